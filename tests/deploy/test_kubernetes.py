"""What Kubernetes is told: its schemas accept it, it is right about the node, and nodes start by it.

There is no Kubernetes here. The last test does what it would do: processes with the environment, the mounts
and the probes of the manifests, at addresses that change. `make build/deploy/ready` fetches the schemas.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from laminar.http.api.roles import PUBLIC
from laminar.http.api.routes import ROUTES
from laminar.node.host.settings import SETTINGS, Settings
from laminar.node.host.settings_sources import load
from laminar.node.runtime.listeners import plan_ports
from laminar.testing.cluster import LocalCluster
from tests.cluster.names import Names
from tests.cluster.patience import asked

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "kubernetes" / "base"
FIRST_START = ROOT / "deploy" / "kubernetes" / "first-start"
TOOLS = ROOT / "build" / "deploy" / "bin"
NAMESPACE = "queues"
# It ends what hangs, and judges nothing.
PATIENCE_S = 120.0


def documents(file: Path) -> list[Any]:
    """The objects of a file."""
    return [msgspec.yaml.decode(part) for part in file.read_text().split("\n---\n")]


def objects() -> dict[str, Any]:
    """The objects of `base`, by kind and name."""
    files = msgspec.yaml.decode((BASE / "kustomization.yaml").read_text())["resources"]
    found = [each for file in files for each in documents(BASE / file)]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in found}


OBJECTS = objects()
SET = OBJECTS["StatefulSet/laminar"]["spec"]
POD = SET["template"]["spec"]
[NODE] = POD["containers"]
PODS = [f"laminar-{number}" for number in range(SET["replicas"])]


def environment(pod: str, address: str, *, first: bool = False) -> dict[str, str]:
    """The variables of a pod's node, as Kubernetes makes them; of `first-start` if so."""
    fields = {"metadata.name": pod, "metadata.namespace": NAMESPACE, "status.podIP": address}
    found: dict[str, str] = {}
    for each in NODE["env"]:
        source = each.get("valueFrom")
        value = fields[source["fieldRef"]["fieldPath"]] if source else each["value"]
        found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], value)
    if first:
        [patch] = msgspec.yaml.decode((FIRST_START / "kustomization.yaml").read_text())["patches"]
        spec = msgspec.yaml.decode(patch["patch"])["spec"]
        assert 1 == spec["replicas"]
        for each in spec["template"]["spec"]["containers"][0]["env"]:
            assert "delete" == each["$patch"]
            del found[each["name"]]
    return found


def host_of(pod: str) -> str:
    """The name by which others know a pod."""
    return f"{pod}.{SET['serviceName']}.{NAMESPACE}.svc"


@pytest.fixture
def validate() -> str:
    """The program that knows Kubernetes' schemas."""
    program = TOOLS / "kubernetes-validate"
    if not program.exists():
        assert os.environ.get("REQUIRE") != "deploy", "REQUIRE=deploy, and kubernetes-validate is not there"
        pytest.skip("kubernetes-validate is not installed: `make build/deploy/ready`")
    return str(program)


def rendered(folder: Path) -> str:
    """What kubectl makes of a kustomization; the test is skipped without kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl, which renders a kustomization")
    ran = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert 0 == ran.returncode, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("version", ["", "1.29.0"], ids=["newest", "1.29"])
def test_the_schemas_of_kubernetes_accept_each_object(validate: str, version: str) -> None:
    """Without a property that they don't know."""
    files = [BASE / file for file in ("statefulset.yaml", "services.yaml", "disruption.yaml")]
    words = [validate, "--strict", *(["--kubernetes-version", version] if version else []), *map(str, files)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)

    told = ran.stdout + ran.stderr
    assert 0 == ran.returncode, told
    assert len(OBJECTS) == told.count(" passed for resource "), told


def test_a_wrong_object_is_refused(validate: str, tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    wrong = (BASE / "statefulset.yaml").read_text().replace("podManagementPolicy:", "podManagmentPolicy:")
    (tmp_path / "wrong.yaml").write_text(wrong)
    ran = subprocess.run([validate, "--strict", tmp_path / "wrong.yaml"], capture_output=True, check=False)

    assert 0 != ran.returncode


def test_kustomize_makes_of_them_what_is_tested_here() -> None:
    """Both folders; the first start differs in the number of pods and in what they join."""
    told = {
        folder: {
            f"{each['kind']}/{each['metadata']['name']}": each["spec"]
            for each in map(msgspec.yaml.decode, rendered(folder).split("\n---\n"))
        }
        for folder in (BASE, FIRST_START)
    }
    assert OBJECTS.keys() == told[BASE].keys() == told[FIRST_START].keys()
    spec, first = told[BASE]["StatefulSet/laminar"], told[FIRST_START]["StatefulSet/laminar"]
    [node], [first_node] = (each["template"]["spec"]["containers"] for each in (spec, first))

    assert NODE["env"] == node["env"]
    assert [each for each in node["env"] if each["name"] != "LAMINAR_JOIN"] == first_node["env"]
    assert (3, 1) == (spec["replicas"], first["replicas"])
    first_node["env"], first["replicas"] = node["env"], spec["replicas"]
    assert told[BASE] == told[FIRST_START]


def test_probes_ask_routes_that_there_are_without_a_token() -> None:
    """Liveness asks nothing that depends on other nodes; readiness waits for the replicas."""
    routes = {route.template: route for route in ROUTES if route.method == "GET"}
    ports = {each["name"]: each["containerPort"] for each in NODE["ports"]}
    asked = {}
    for kind in ("startup", "liveness", "readiness"):
        get = NODE[f"{kind}Probe"]["httpGet"]
        path = get["path"].partition("?")[0]
        assert routes[path].needs == PUBLIC
        assert Settings().port == ports[get["port"]]
        assert ("HTTPS" if "LAMINAR_TLS_KEY" in environment("laminar-0", "127.0.0.1") else "HTTP") == get[
            "scheme"
        ]
        asked[kind] = get["path"]
    assert {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz?replicas=current"} == asked


def test_each_variable_is_a_setting_and_each_pod_has_its_own_names(tmp_path: Path) -> None:
    """Pods know each other by names, gossip by addresses, and never make a cluster of their own."""
    (tmp_path / "secret").write_text("a secret of more than sixteen characters")
    variables = {setting.variable for setting in SETTINGS}
    for number, pod in enumerate(PODS):
        given = environment(pod, f"10.0.0.{number}")
        assert {name for name in given if name.startswith("LAMINAR_")} <= variables
        given["LAMINAR_SECRET_FILE"] = str(tmp_path / "secret")
        settings = load(environ=given).settings
        assert (pod, f"10.0.0.{number}") == (settings.node, settings.gossip_host)
        assert host_of(pod) == settings.advertise_host
        assert [f"{host_of(each)}:{settings.port}" for each in PODS] == list(settings.join)
        assert settings.tls and not settings.is_insecure


def test_variables_that_kubernetes_would_add_are_left_out() -> None:
    """It tells pods of services by variables such as LAMINAR_PORT=tcp://10.0.0.1:7070."""
    assert "LAMINAR_PORT" in {setting.variable for setting in SETTINGS}
    assert "Service/laminar" in OBJECTS
    assert POD["enableServiceLinks"] is False


def test_ports_are_those_that_the_node_opens() -> None:
    """By number of shards; the service for clients has the shared one."""
    shards = int(environment("laminar-0", "127.0.0.1")["LAMINAR_SHARDS"])
    ports = plan_ports(Settings().port, shards, None)
    names = ["http", *(f"http-shard-{shard}" for shard in range(shards)), "controller"]
    numbers = [ports.shared, *ports.own, *ports.peers]
    names += [f"shard-{shard}" for shard in range(shards)]
    wanted = {**dict(zip(names, numbers, strict=True)), "gossip": ports.gossip}

    assert wanted == {each["name"]: each["containerPort"] for each in NODE["ports"]}
    told = OBJECTS["Service/laminar-nodes"]["spec"]["ports"]
    assert wanted == {each["name"]: each["port"] for each in told}
    assert ["gossip"] == [each["name"] for each in told if each.get("protocol") == "UDP"]
    [shared] = OBJECTS["Service/laminar"]["spec"]["ports"]
    assert (Settings().port, "http") == (shared["port"], shared["targetPort"])


def test_one_node_at_a_time_is_stopped_and_each_is_on_a_machine_of_its_own() -> None:
    """And its peers find it before it is ready; a stop has the time that a node takes."""
    labels = SET["template"]["metadata"]["labels"]
    nodes, budget = OBJECTS["Service/laminar-nodes"]["spec"], OBJECTS["PodDisruptionBudget/laminar"]["spec"]
    [apart] = POD["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    assert ("Parallel", "RollingUpdate") == (SET["podManagementPolicy"], SET["updateStrategy"]["type"])
    assert ("None", True) == (nodes["clusterIP"], nodes["publishNotReadyAddresses"])
    assert (1, labels) == (budget["maxUnavailable"], budget["selector"]["matchLabels"])
    assert ("kubernetes.io/hostname", labels) == (apart["topologyKey"], apart["labelSelector"]["matchLabels"])
    assert labels == nodes["selector"] == OBJECTS["Service/laminar"]["spec"]["selector"]
    pause_s = int(NODE["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] >= 2 * (pause_s + Settings().drain_ms / 1000)


def test_the_pod_is_what_the_image_is_made_for() -> None:
    """Its user, its folder; nothing else can be written to. The node's folder is one in the volume's."""
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    user = POD["securityContext"]
    mounts = {each["mountPath"]: each for each in NODE["volumeMounts"]}

    assert f"USER {user['runAsUser']}:{user['runAsGroup']}\n" in image
    assert user["runAsUser"] == user["runAsGroup"] == user["fsGroup"] and user["runAsNonRoot"]
    assert "OnRootMismatch" == user["fsGroupChangePolicy"]
    assert NODE["securityContext"]["readOnlyRootFilesystem"]
    assert 'VOLUME ["/var/lib/laminar"]' in image
    writable = [path for path, mount in mounts.items() if not mount.get("readOnly")]
    assert ["/var/lib/laminar"] == writable
    assert Path("/var/lib/laminar") == Path(environment("laminar-0", "127.0.0.1")["LAMINAR_DATA"]).parent


class Pods(LocalCluster):
    """Nodes as the manifests have them. The folder has one for each secret, and one with their volumes."""

    names: Names
    first = False

    def environment(self) -> dict[str, str]:
        """As always, and with the pods' host names."""
        return super().environment() | dict(self.names.environment)

    def command(self, number: int) -> list[str]:
        """The image's command, with mounts where this test has them, and one shard."""
        member = self.members[number]
        given = environment(PODS[number], member.host, first=self.first) | {"LAMINAR_SHARDS": "1"}
        assert "0.0.0.0" == given["LAMINAR_HOST"]
        given["LAMINAR_HOST"] = member.host  # a pod has its own network, which this test has not
        for mount in NODE["volumeMounts"]:
            place = self.volume(number) if mount["name"] == "data" else Path(self.directory) / mount["name"]
            for name, value in given.items():
                given[name] = value.replace(mount["mountPath"], str(place))
        words = [f"{name}={value}" for name, value in given.items()]
        return [str(shutil.which("env")), *words, sys.executable, "-P", "-m", "laminar.node"]

    def volume(self, number: int) -> Path:
        """The volume of a pod."""
        return Path(self.directory) / "volumes" / PODS[number]

    def begin(self, number: int, *, last: int) -> None:
        """Start a pod at the address `last` of the net."""
        member = self.members[number]
        member.host = f"{member.host.rpartition('.')[0]}.{last}"
        self.names.set(host_of(PODS[number]), member.host)
        self.spawn(number)

    def until_ready(self, number: int) -> None:
        """Ask as the kubelet does, by the pod's address, until the pod is ready."""
        get = NODE["readinessProbe"]["httpGet"]
        url = f"{get['scheme'].lower()}://{self.members[number].host}:{Settings().port}{get['path']}"
        deadline, told = time.monotonic() + PATIENCE_S, ""
        with httpx.Client(verify=False, trust_env=False, timeout=PATIENCE_S) as http:
            while time.monotonic() < deadline and self.members[number].running:
                try:
                    answer = http.get(url)
                except httpx.TransportError as error:
                    told = repr(error)
                else:
                    told = answer.text
                    if answer.status_code == 200:
                        return
                time.sleep(0.02)
        raise AssertionError(f"{PODS[number]}: {told}\n{self.members[number].log_tail()}")


def run_readme(folder: Path) -> None:
    """Run what deploy/README.md says before `kubectl`, in a folder."""
    text = (ROOT / "deploy" / "README.md").read_text()
    [block] = [each for each in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "laminar cert ca" in each]
    program, _, applied = block.partition("kubectl")
    assert "create secret" in applied.splitlines()[0]
    program = re.sub(r"^namespace=.*$", f"namespace={NAMESPACE}", program, flags=re.MULTILINE)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["sh", "-eu"], input=program.encode(), cwd=folder, env=os.environ | {"PATH": path}, check=True
    )


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """Pods that were not started yet, with volumes as Kubernetes makes them: the group's, not the user's."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (Debian: apt-get install gcc libc6-dev)")
    cluster = Pods(tmp_path, nodes=len(PODS))
    cluster.names = Names(tmp_path)
    for number in range(len(PODS)):
        cluster.volume(number).mkdir(parents=True)
        cluster.volume(number).chmod(0o2775)
    for volume in POD["volumes"]:
        (tmp_path / volume["name"]).mkdir()
    run_readme(tmp_path / "tls")
    (tmp_path / "tls" / "secret").rename(tmp_path / "secret" / "secret")
    try:
        yield cluster
    finally:
        cluster.stop()


def test_a_cluster_begins_as_the_readme_says_and_knows_its_nodes_by_their_names(pods: Pods) -> None:
    """First one pod, which makes the cluster; then that and others at other addresses, by the same names.

    Two of three are enough here; each of the three joins in `tests/cluster/test_moving_nodes.py`.
    """
    pods.first = True
    pods.begin(0, last=10)
    pods.until_ready(0)
    process = pods.members[0].process
    assert process is not None
    process.terminate()
    assert 0 == process.wait(PATIENCE_S)
    pods.first = False
    pods.begin(0, last=20)
    pods.begin(1, last=21)
    pods.until_ready(0)
    pods.until_ready(1)

    token = (pods.volume(0) / "data" / "admin-token").read_text().strip()
    url = f"https://{pods.members[1].host}:{Settings().port}"
    headers = {"Authorization": f"Bearer {token}", "Host": f"laminar.{NAMESPACE}.svc"}
    with httpx.Client(base_url=url, headers=headers, verify=False, trust_env=False, timeout=60) as http:
        assert asked(http, "PUT", "/v1/topics/t", json={"partitions": 1, "replicas": 2}).is_success
        told = http.get("/v1/cluster").json()
        assert 421 == http.get("/v1/cluster", headers={"Host": "laminar.other.svc"}).status_code
    assert not told.get("insecure")
    known = {each["node"]: each["peer"].rpartition(":")[0] for each in told["nodes"]}
    assert {pod: host_of(pod) for pod in PODS[:2]} == known
