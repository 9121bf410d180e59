"""Templates that import little, for tests that start many of them and train nothing.

    from tests.templates import import_little; import_little()

in a kernel, or in the tests' own process, before it starts its template.
"""

from notebook_accel.launch.template import handle

IMPORT_LITTLE = "from tests.templates import import_little; import_little()\n"
_SERVE = "from notebook_accel.launch.template.process import serve"
# What optimizers and our training need: more than half of what a template imports.
_LEFT_OUT = ("torch._dynamo", "notebook_accel.training")


def import_little() -> None:
    """Templates started from here on leave out what takes long; ranks import it each for itself."""
    assert _SERVE in handle._BOOT
    handle._BOOT = handle._BOOT.replace(
        _SERVE,
        f"from notebook_accel.launch.template import process; process._PRELOADED = [name for name "
        f"in process._PRELOADED if not name.startswith({_LEFT_OUT!r})]; {_SERVE}",
    )
