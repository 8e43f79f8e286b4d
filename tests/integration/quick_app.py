"""`quick`: `tiny`, with a target that is soon met, and no harder one."""

from msgspec.structs import replace

from tests.integration import tiny_app

MODULE = "tests.integration.quick_app"
SPEC = replace(
    tiny_app.SPEC,
    name="quick",
    target=0.4,
    target_min=0.4,
    max_progress=2000.0,
    max_batch_size=2 * tiny_app.SPEC.initial_batch_size,
)
build = tiny_app.build
