"""One page from results: pictures, tables, intervals, fills; a PNG, CSV and LaTeX file for each
beside it.

    tracformer report results/                          writes report/index.html
    tracformer report results/a results/b --out page/

The page needs no network and no other file.
"""

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="folders of results, or single result files"
    )
    parser.add_argument(
        "--out",
        default="report",
        metavar="FOLDER",
        help="where the page and its files go (default: report)",
    )
    parser.add_argument("--title", default="Evaluation", help="of the page")
    parser.add_argument("--json", action="store_true", help="print the page's name as JSON")


def run(arguments: argparse.Namespace) -> int:
    from tracformer.report import write_report

    path = write_report(arguments.folders, arguments.out, title=arguments.title)
    print(json.dumps({"page": str(path)}) if arguments.json else path)
    return 0
