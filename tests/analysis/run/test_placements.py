from analysis.run.placements import placed_samples
from tests.fixtures.logs import add, good_run, history_of, sample


def test_a_sample_has_the_placement_of_the_newest_group_up_to_its_generation() -> None:
    totals = {"total_steps": 40, "total_examples": 640, "progress": 40.0}
    batch_changed = sample("b", 2, 3.0, **totals)
    placed = placed_samples(history_of(add(good_run(), "agent-n0", 125.0, batch_changed)))
    assert placed.select("job_id", "generation", "placement", "application").rows() == [
        ("a", 1, [1], "digits-cnn"),
        ("a", 2, [1, 1], "digits-cnn"),
        ("a", 2, [1, 1], "digits-cnn"),
        ("b", 1, [1], "digits-cnn"),
        ("b", 2, [1], "digits-cnn"),
    ]


def test_samples_of_groups_that_the_log_does_not_describe_are_left_out() -> None:
    unknown = sample("b", 0, 3.0, total_steps=1, total_examples=16, progress=1.0)
    run = history_of(add(good_run(), "agent-n0", 117.0, unknown))
    assert len(run.frames.samples) == len(placed_samples(run)) + 1
