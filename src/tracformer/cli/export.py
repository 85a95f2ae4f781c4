"""Write a Tracformer as a folder for `transformers`, to be used without tracformer.

    tracformer export stories --hf stories-hf
    tracformer export --model runs/my --hf my-model --name me/my-model --license mit

The folder has configuration, weights, tokenizer, generation settings, a model card, and
modeling_tracformer.py, which AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True)
runs. Upload it with `hf upload OWNER/NAME FOLDER`.
"""

import argparse

from tracformer.cli import arguments as shared
from tracformer.cli import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer export`."""
    parser.add_argument("folder", nargs="?", metavar="MODEL", help="like --model")
    shared.add_model(parser)
    parser.add_argument(
        "--hf", metavar="FOLDER", required=True, help="folder to write; it must be empty or missing"
    )
    parser.add_argument("--name", default="", help="OWNER/NAME on the hub, for the model card")
    parser.add_argument(
        "--license",
        default="apache-2.0",
        help="license, for a new model card (default: apache-2.0)",
    )
    shared.add_no_verify(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `tracformer export`."""
    if arguments.folder and arguments.model:
        raise ValueError(
            f"two models given, {arguments.folder} and --model {arguments.model}; give one of them"
        )
    from tracformer.publish import export_folder

    folder = export_folder(
        arguments.folder or arguments.model or shared.default_model(),
        arguments.hf,
        name=arguments.name,
        license=arguments.license,
        verify=arguments.verify,
    )
    sizes = [(f"{path.stat().st_size:,}", path.name) for path in sorted(folder.iterdir())]
    output.put(f"{folder}: bytes of each file")
    for size, name in sizes:
        output.put(f"  {size:>12} {name}")
    return 0
