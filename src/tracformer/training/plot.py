"""Training curves as a picture: loss and held-out perplexities over steps."""

from pathlib import Path

from tracformer.files import optional_package
from tracformer.training.log import perplexities, read_log


def plot_runs(runs: list[Path], out: Path) -> None:
    names = [folder.name for folder in runs]
    records = {}
    for folder, name in zip(runs, names, strict=True):
        if not (folder / "log.jsonl").is_file():
            raise FileNotFoundError(f"{folder} is not the folder of a run: there is no log.jsonl in it")
        records[name if names.count(name) == 1 else str(folder)] = read_log(folder / "log.jsonl")
    optional_package("matplotlib", "a plot", "plot").use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, lines in records.items():
        train = [line for line in lines if line["kind"] == "train"]
        left.plot([line["step"] for line in train], [line["loss"] for line in train], label=name, linewidth=1)
        held_out = [line for line in lines if line["kind"] == "eval"]
        for key in dict.fromkeys(key for line in held_out for key in perplexities(line)):
            label = f"{name}: {key}" if len(records) > 1 else key
            asked = [line for line in held_out if key in line]  # what is validated may change on the way
            right.plot([line["step"] for line in asked], [line[key] for line in asked], label=label, marker=".")
    left.set(title="training", xlabel="step", ylabel="nats per target")
    right.set(title="held out", xlabel="step", ylabel="conditional perplexity", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)
