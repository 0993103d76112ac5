"""What every test gets without asking: a marker and a time limit from its folder, uvloop, and a clean end.

`tests/README.md` says where a test goes. The looking itself is in `tests/guards.py`.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import inspect
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import uvloop
from hypothesis.internal.conjecture import providers

from laminar.testing import nodes
from tests import guards, pure_only, quick_tls
from tests.nets import ClusterNet, claim_net
from tests.warm_start import EXECUTED, Servers

pytest_plugins = ("tests.cpu", "tests.failures")

TESTS = Path(__file__).parent

# Folder: marker and limit in seconds. A limit ends what hangs, and judges nothing: some twenty times what the
# slowest test takes on a machine of its own, as other loads may take all but a tenth of this one.
STAGES = {"cluster": 480, "docs": 480, "spark": 600}
UNIT_LIMIT_S = 480
# How long tasks may take to end once their test is through. On a loaded machine seconds may be one turn, and
# what a task waits for may be a sync of the disk.
PENDING_S = guards.GRACE_S
# How long the teardown of a test may take that exceeded its limit: long enough to name the pending tasks.
TEARDOWN_LIMIT_S = PENDING_S + 20

# Folders and files whose tests are computation alone.
PURE = (
    "raft/",
    "router/",
    "batch/",
    "wire/test_key_route",
)

hypothesis.settings.register_profile(
    "ci",
    deadline=None,  # a shared core makes any deadline a coin toss; pytest-timeout has the last word
    derandomize=True,
    database=None,
    print_blob=True,
)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2_000, print_blob=True)
# For runs of which only is asked whether they fail.
hypothesis.settings.register_profile(
    "mutants",
    parent=hypothesis.settings.get_profile("ci"),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("ci")
# Hypothesis draws from the constants of all modules of ours that are loaded, too. Which are, depends on the
# tests that a worker has run before: a test's examples would differ from run to run, and when it runs alone.
_NONE_OF_OURS = providers._local_constants
providers._get_local_constants = lambda: _NONE_OF_OURS

pure_only.guard_monkeypatch()
quick_tls.share_context()

run_key = pytest.StashKey[str]()
data_key = pytest.StashKey[Path | None]()
left_key = pytest.StashKey[list[str]]()
skipped_key = pytest.StashKey[str]()
servers_key = pytest.StashKey[Servers]()
failed_key = pytest.StashKey[bool]()


# --- where a test lies says what it is --------------------------------------------------------------------


def place(item: pytest.Item) -> str:
    """Return the test's file below tests/, as "raft/test_core.py"; elsewhere below the run's root."""
    return _place(item.path, item.config.rootpath)


@cache  # asked for several times of each of thousands of tests: else a tenth of what collecting them takes
def _place(path: Path, rootpath: Path) -> str:
    root = TESTS if path.is_relative_to(TESTS) else rootpath
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite` for files of expected output."""
    parser.addoption("--rewrite", action="store_true", help="write the output of scenario files anew")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark by folder, set the stage's limit, put in order, and leave Spark out where it can't run."""
    if hasattr(config, "workerinput"):
        from tests import scheduling  # needs xdist, which only runs with several workers load

        items.sort(key=lambda item: scheduling.turn(place(item)))
    patience = 4 if in_background(config, items) else 1  # there a test may get less than a third of the time
    absent = why_no_spark() if any(place(item).startswith("spark/") for item in items) else None
    for item in items:
        folder = place(item).partition("/")[0]
        stage = folder if folder in STAGES else "unit"
        item.add_marker(stage)
        # A limit on the command line (make test-long) is meant for all; a marker would go before it.
        if config.getoption("timeout") is None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(patience * STAGES.get(stage, UNIT_LIMIT_S)))
        if stage == "spark" and absent:
            item.add_marker(pytest.mark.skip(reason=absent))
        if place(item).startswith(PURE):
            _set_up_first("_purity", item)
        if _has_loop(item):
            _set_up_first("_no_task_is_left", item)


def _set_up_first(fixture: str, item: pytest.Item) -> None:
    """Have a fixture set up before a test's own. An autouse one would cost all others half a millisecond."""
    names: list[str] = getattr(item, "fixturenames", [])
    if fixture not in names:  # tests of one function share the list
        names.insert(0, fixture)


def _has_loop(item: pytest.Item) -> bool:
    """Whether a test runs on a loop of its own."""
    marker = item.get_closest_marker("asyncio")
    own = marker is not None and marker.kwargs.get("loop_scope", "function") == "function"
    return own and inspect.iscoroutinefunction(getattr(item, "function", None))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without the collector of garbage, which took a tenth of the time and found nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the collector of garbage off what lives until the end: all tests, and all that they import.

    And let it come more rarely than by default: simulations and clients make little that it finds. A worker
    in the background lowers its priority here, as the others wait until it has collected its tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    if in_background(session.config, session.items):
        from tests import scheduling

        os.nice(scheduling.NICE)


def in_background(config: pytest.Config, items: list[pytest.Item]) -> bool:
    """Return whether this process is a worker that only computes, at a lower priority."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return False
    from tests import scheduling

    own = scheduling.in_background(worker["workerid"], worker["workercount"])
    return own and scheduling.some_compute(item.nodeid for item in items)


def asks_for_spark(config: pytest.Config) -> bool:
    """Whether the command line names Spark's tests, or a folder that holds them."""
    spark = TESTS / "spark"
    here = config.invocation_params.dir
    named = [(here / argument.partition("::")[0]).resolve() for argument in config.args]
    ignored = [(here / path).resolve() for path in config.getoption("ignore") or ()]
    return spark not in ignored and any(
        spark.is_relative_to(path) or path.is_relative_to(spark) for path in named
    )


def why_no_spark() -> str | None:
    """None where Spark can run, else what is missing and how to get it."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed (pip install 'laminar-mq[spark]', or make test)"
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    wanted = "Spark needs Java 17 or newer (Debian: apt-get install openjdk-17-jre-headless)"
    if java is None:
        return f"there is no Java; {wanted}"
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=300).stderr
        version = told.split('"')[1].split(".")[0]
    except (OSError, IndexError):
        return f"{java} does not run; {wanted}"
    return None if int(version.split("-")[0]) >= 17 else f"{java} is version {version}; {wanted}"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say last, below pytest's own last line, what could not run here."""
    if config.stash.get(skipped_key, None) and not hasattr(config, "workerinput"):
        print(config.stash[skipped_key])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Let what takes long begin first."""
    from tests import scheduling

    return scheduling.scheduler(config, log) if config.getoption("dist") == "loadscope" else None


# --- nothing is left behind -------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Name this run. With xdist each worker is a run of its own, as its environment shows only its start."""
    config.stash[run_key] = str(uuid.uuid4())
    config.stash[data_key] = None
    # A shell lets what it starts in the background ignore Ctrl-C, and so would all that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ[guards.RUN_VARIABLE] = config.stash[run_key]
    # No node of a test touches this machine's interfaces; tests/ebpf asks for it in networks of its own.
    os.environ["LAMINAR_STEER"] = "off"
    config.stash[servers_key] = Servers()
    nodes.start_process = config.stash[servers_key].start_process
    # Said here and not where tests are collected: a worker's words do not reach the terminal.
    if not hasattr(config, "workerinput") and asks_for_spark(config) and (absent := why_no_spark()):
        if "spark" in os.environ.get("REQUIRE", "").split(","):
            raise pytest.UsageError(f"REQUIRE=spark, but {absent}")
        config.stash[skipped_key] = f"Spark's tests were skipped: {absent}"


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """After the last test no process, socket or file of ours is left, or the run fails."""
    yield
    config = session.config
    said = config.stash.setdefault(left_key, [])
    if config.getoption("numprocesses", None) is None or hasattr(config, "workerinput"):
        guards.stop_spark()
        leftovers = guards.await_processes_of(config.stash[run_key])
        said += map(str, leftovers)
        said += guards.own_open_things(config.stash[data_key])
        guards.end(leftovers)
        config.stash[servers_key].close()
    if hasattr(config, "workerinput"):
        config.workeroutput["left"] = said  # type: ignore[attr-defined]  # xdist's; the controller reports it
    elif said:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\n\nleft over after the last test:", *said, sep="\n  ")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Gather what a worker found when it ended."""
    left = getattr(node, "workeroutput", {}).get("left", [])
    node.config.stash.setdefault(left_key, []).extend(left)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Say how the nodes of this test and its fixtures are started."""
    item.config.stash[servers_key].executes = place(item).startswith(EXECUTED)


@pytest.fixture(scope="session", autouse=True)
def _data_of_the_run(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> None:
    """Note where `tmp_path` lies: no file below it may be open at the end."""
    pytestconfig.stash[data_key] = tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_is_left() -> Iterator[None]:
    """What a module's tests left in cycles is collected with them; what it warns of fails the last of them.

    Else an unclosed socket or a coroutine that nobody awaited fails whichever test runs when the collector
    comes, in a module of another folder perhaps, and seldom the same one twice.
    """
    yield
    gc.collect()


@pytest.fixture
def _no_task_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """When a test and its fixtures are through, no task of its loop is pending: each is awaited or cancelled.

    The runner is asked for here, so that it is set up before the test's own fixtures and closed after this.
    """
    runner: asyncio.Runner = request.getfixturevalue("_function_scoped_runner")
    yield
    if pending := runner.run(_pending_tasks()):
        pytest.fail("tasks left pending:\n" + "\n".join(map(repr, pending)), pytrace=False)


async def _pending_tasks() -> set[asyncio.Task[Any]]:
    """Tasks beside this one that some seconds' patience does not end."""
    loop = asyncio.get_running_loop()
    patience = loop.time() + PENDING_S
    while pending := asyncio.all_tasks() - {asyncio.current_task()}:
        if loop.time() > patience:
            return pending
        await asyncio.wait(pending, timeout=0.05)
    return set()


@pytest.fixture
def _purity(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of a pure module may open no socket and no process."""
    with guards.refuse_sockets_and_processes(request.node.nodeid):
        yield


# --- what tests ask for -----------------------------------------------------------------------------------


class LimitedLoop(uvloop.Loop):
    """uvloop, which lets a time limit end the test.

    pytest-timeout raises in a signal handler. uvloop only reports what is raised there and runs on, so a test
    that waits for ever would do so in spite of its limit.
    """

    _exceeded: BaseException | None = None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        exception = context.get("exception")
        if isinstance(exception, pytest.fail.Exception):
            self._exceeded = exception
            signal.setitimer(signal.ITIMER_REAL, TEARDOWN_LIMIT_S)  # the test's fixtures may hang as well
            self.stop()
        else:
            super().call_exception_handler(context)

    def run_until_complete(self, future: Any) -> Any:
        try:
            return super().run_until_complete(future)
        except RuntimeError:  # "stopped before Future completed"
            exceeded, self._exceeded = self._exceeded, None
            if exceeded is None:
                raise
            raise exceeded from None


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the loop that production runs on."""
    return {"uvloop": LimitedLoop}


@pytest.fixture
def cluster_net() -> Iterator[Callable[[], ClusterNet]]:
    """Gives loopback nets, one per call, each this test's alone."""
    held: list[ClusterNet] = []

    def give() -> ClusterNet:
        held.append(claim_net())
        return held[-1]

    yield give
    for net in held:
        net.close()


@pytest.fixture
def real_disk(tmp_path: Path) -> Path:
    """A folder where `fdatasync` means something: on tmpfs a test of durability proves nothing, and fails."""
    kind = guards.filesystem_of(tmp_path)
    if kind in ("tmpfs", "ramfs"):
        pytest.fail(f"{tmp_path} is on {kind}: give a folder on a disk by --basetemp", pytrace=False)
    return tmp_path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A cluster test that fails keeps its data and logs, and says where; one that passes keeps no data.

    The data of all tests is some GB, which would stay in the page cache: to touch memory for the first time
    takes a virtual machine ten times as long as to use it again. On the compiled build a test that needs the
    pure one is skipped (`tests/pure_only.py`).
    """
    report = yield
    if report.failed and call.excinfo is not None and (why := pure_only.reason(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {why}")
    data = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and data is not None and place(item).startswith(("cluster/", "docs/", "spark/")):
        report.sections.append(("data, logs and history are kept in", str(data)))
    item.stash[failed_key] = report.failed or item.stash.get(failed_key, False)
    if report.when == "teardown" and data is not None and not item.stash[failed_key]:
        shutil.rmtree(data, ignore_errors=True)
    return report
