"""Help: every command has a page with one example, the example is right, and the page comes at once."""

from __future__ import annotations

import inspect
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from laminar.cli.app import COMMANDS, FAMILIES, Command, app
from laminar.compiled import described
from tests.cli.conftest import Command as Laminar


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.path)
def test_each_page_has_one_example(command: Command, laminar: Laminar) -> None:
    """`--help` says what the command does and gives one example."""
    page = " ".join(laminar(*command.path.split(), "--help").text.split())

    assert command.help.rstrip(".") in page.replace("│ ", "")
    assert page.endswith(f"Example: {command.example}")
    assert 1 == page.count("Example:")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.path)
def test_each_example_is_understood(command: Command) -> None:
    """The example is a call of the command it stands under, with arguments that the command takes."""
    words = shlex.split(command.example)

    function, _, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)

    assert "laminar" == words[0]
    assert (
        f"laminar.cli.commands.{command.target}"
        == f"{inspect.unwrap(function).__module__}:{function.__name__}"
    )


def test_every_command_is_on_the_page_of_its_family(laminar: Laminar) -> None:
    """`laminar --help` lists first words, and a family's page its commands."""
    page = laminar("--help").text

    for command in COMMANDS:
        first, _, second = command.path.partition(" ")
        assert first in page
        assert not second or second in laminar(first, "--help").text
    assert {family.name for family in FAMILIES} == {
        command.path.split()[0] for command in COMMANDS if " " in command.path
    }


def test_the_documentation_lists_every_command() -> None:
    """As the table has them, in its order."""
    page = (Path(__file__).parents[2] / "docs" / "first-steps.md").read_text()

    listed = page.partition("## All commands")[2].splitlines()
    assert [f"| `{command.path}` | {command.help} |" for command in COMMANDS] == [
        line for line in listed if line.startswith("| `")
    ]


def test_version(laminar: Laminar) -> None:
    """`laminar --version` is the distribution's version, and whether its modules are compiled."""
    assert f"{version('laminar-mq')} ({described()})\n" == laminar("--version").text


def test_help_loads_no_command() -> None:
    """The tree of commands is a table: no client, no node and nothing slow (`email`) is imported for it."""
    program = (
        "import sys; from laminar.cli import run; run(['--help']); "
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in "
        "('laminar', 'raft', 'membership', 'asyncio', 'email', 'uvloop', 'msgspec', 'matplotlib')), "
        "file=sys.stderr)"
    )

    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stderr

    assert ["laminar", "laminar.cli", "laminar.cli.app", "laminar.cli.exit_codes"] == said.split()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["topci"], "Did you mean"),
        (["topic", "create"], "requires an argument"),
        (["topic", "list", "--outptu", "json"], "--output"),
        (["topic", "list", "-o", "yaml"], "yaml"),
        (["produce", "hello", "--batch", "much"], "--batch"),
    ],
)
def test_wrong_use_is_2_and_says_why_on_standard_error(
    arguments: list[str], said: str, laminar: Laminar
) -> None:
    """What was meant is guessed at, nothing is on standard output, and the code is 2."""
    ran = laminar(*arguments)

    assert 2 == ran.code
    assert b"" == ran.out
    assert said in ran.err
