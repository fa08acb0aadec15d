"""Finding workflows in a package, and the application by its name."""

import sys
import textwrap

import pytest

from perdure.runtime.app import App
from perdure.runtime.authoring.registry import Registry
from perdure.runtime.discovery import DiscoveryError, discover, load_app, module_folder
from perdure.storage.errors import ConfigurationError

WORKFLOW = """
    from perdure.runtime.authoring.definitions import workflow

    @workflow(name="{name}")
    async def body(ctx) -> None: ...
"""


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """Write modules below a package of a name nobody else has, importable from the current folder."""
    name = f"shop_{abs(hash(request.node.nodeid)) % 10**9}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def write(**modules: str) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "__init__.py").touch()
        for module, text in modules.items():
            path = (tmp_path / name).joinpath(*module.split("_in_")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in [f for f in path.parents if tmp_path / name in f.parents]:
                (folder / "__init__.py").touch()
            path.write_text(textwrap.dedent(text).replace("PACKAGE", name), encoding="utf-8")
        return name

    yield write
    for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
        del sys.modules[loaded]


def warned(package_name, registry=None) -> list[str]:
    said: list[str] = []
    discover(package_name, registry or Registry(), warn=said.append)
    return said


@pytest.mark.req("WF4")
class TestDiscover:
    def test_one_call_finds_workflows_at_any_depth(self, package):
        name = package(
            orders_workflow=WORKFLOW.format(name="orders"),
            deep_in_down_in_refunds=WORKFLOW.format(name="refunds"),
        )
        registry = Registry()
        assert discover(name, registry) == ["refunds", "orders"]
        assert registry.names() == ["orders", "refunds"]

    def test_a_definition_that_others_import_is_one_definition(self, package):
        name = package(
            a=WORKFLOW.format(name="orders"),
            b="from PACKAGE.a import body\nagain = body\n",
        )
        assert discover(name, Registry()) == ["orders"]

    def test_an_app_discovers_its_package_beside_what_it_was_given(self, package):
        name = package(a=WORKFLOW.format(name="orders"))
        app = App("shop", discover=name)
        assert app.registry.names() == ["orders"]
        assert discover(name, app.registry) == ["orders"]

    @pytest.mark.parametrize("module", ["orders_workflow", "nightly_cron", "stock_trigger"])
    def test_a_module_that_promises_and_holds_none_is_warned_about_with_its_path(
        self, package, tmp_path, module
    ):
        name = package(**{module: "x = 1\n"})
        (said,) = warned(name)
        assert str(tmp_path / name / f"{module}.py") in said

    def test_no_warning_where_the_promise_is_kept_or_none_is_made(self, package):
        name = package(orders_workflow=WORKFLOW.format(name="orders"), plain="x = 1\n")
        assert warned(name) == []

    def test_two_definitions_with_one_name_are_refused_with_both_places(self, package):
        name = package(a=WORKFLOW.format(name="orders"), b="\n" + WORKFLOW.format(name="orders"))
        with pytest.raises(ConfigurationError) as refused:
            discover(name, Registry())
        assert f"{name}/a.py:" in str(refused.value)
        assert f"{name}/b.py:" in str(refused.value)

    def test_programs_are_not_run(self, package):
        name = package(__main__="raise SystemExit('run')\n")
        assert discover(name, Registry()) == []

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("import no_such_module_anywhere\n", "ModuleNotFoundError"),
            ("x = 1\n1 / 0\n", "ZeroDivisionError: division by zero"),
            ("raise SystemExit(3)\n", "SystemExit: 3"),
            ("def broken(:\n", "SyntaxError"),
        ],
    )
    def test_an_import_that_fails_names_the_module_and_the_line(self, package, text, said):
        name = package(inner_in_broken=text)
        with pytest.raises(DiscoveryError) as refused:
            discover(name, Registry())
        message = str(refused.value)
        assert f"importing {name}.inner.broken failed: {said}" in message
        assert f"{name}/inner/broken.py:" in message

    def test_a_package_that_is_not_there(self):
        with pytest.raises(DiscoveryError, match="no module named 'no_such_package_here'"):
            discover("no_such_package_here.workflows", Registry())


class TestLoadApp:
    APP = """
        from perdure.runtime.app import App
        shop = App("shop")
        class Inside:
            app = shop
    """

    def test_module_and_attribute(self, package):
        name = package(main=self.APP)
        assert load_app(f"{name}.main:shop").name == "shop"
        assert load_app(f"{name}.main:Inside.app") is load_app(f"{name}.main:shop")

    @pytest.mark.parametrize(
        ("path", "said"),
        [
            ("PACKAGE.main", "write module:attribute"),
            (":shop", "write module:attribute"),
            ("PACKAGE.nowhere:shop", "no module named 'PACKAGE.nowhere'"),
            ("PACKAGE.main:app", "has no app; it has PACKAGE.main:shop"),
            ("PACKAGE.main:Inside", "is a type, not an App"),
        ],
    )
    def test_what_is_wrong_is_said(self, package, path, said):
        name = package(main=self.APP)
        with pytest.raises(DiscoveryError) as refused:
            load_app(path.replace("PACKAGE", name))
        assert said.replace("PACKAGE", name) in str(refused.value)

    def test_a_module_missing_inside_the_application_is_not_taken_for_the_application(
        self, package
    ):
        name = package(main="import not_installed_here\n")
        with pytest.raises(DiscoveryError, match=r"importing .*main failed: ModuleNotFoundError"):
            load_app(f"{name}.main:app")

    def test_a_refused_definition_is_at_fault_in_the_line_of_the_application(
        self, package, tmp_path
    ):
        name = package(main="from perdure import Retry\n\nRetry(max_attempts=None)\n")
        with pytest.raises(DiscoveryError, match=r"needs max_elapsed.*main\.py:3\)"):
            load_app(f"{name}.main:app")

    def test_the_folder_is_found_without_importing(self, package, tmp_path):
        name = package(main="raise RuntimeError('imported')\n")
        assert module_folder(f"{name}.main:app") == tmp_path
        assert module_folder("no_such_package_here:app") is None
