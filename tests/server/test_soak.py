"""What takes longer: requests made up by schemathesis, lm-eval's own client, and
many clients at once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.cli.helpers import save_model
from tests.server.helpers import WORDS, make, running
from tests.server.test_holding_up import GOOD, shaped
from tracformer import load
from tracformer.data import train_bpe
from tracformer.server import Limits, Settings

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["positive", "negative"])
def test_no_request_breaks_the_server(kind: str) -> None:
    """Every endpoint: what its description allows, and what it does not.

    Never a 5xx, and errors in the protocol's shape.
    """
    import schemathesis

    lm = make()
    limits = Limits(n=4, best_of=4, nodes=50)
    with running(lambda: lm, Settings(port=0, timeout=20, limits=limits)) as there:
        schema = schemathesis.openapi.from_url(f"{there.url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        assert {operation.path for operation in operations} >= set(GOOD)
        seen = set()

        def check(case: Any) -> None:
            response = case.call(timeout=60)
            seen.add(response.status_code)
            assert response.status_code < 500
            if response.status_code >= 400:
                assert shaped(case.operation.path, response.json())

        bounded = settings(
            max_examples=120,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        for operation in operations:
            # the others ask for nothing that could be wrong
            if kind == "positive" or operation.path in GOOD:
                bounded(
                    given(
                        case=operation.as_strategy(
                            generation_mode=schemathesis.GenerationMode(kind)
                        )
                    )(check)
                )()
        assert 400 in seen
        for path, asked in GOOD.items():
            there.good(path, asked)


TASK = """
task: tiny_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{before}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
EVALUATE = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
url, tokenizer, folder = sys.argv[1:]
arguments = {"model": "tiny", "base_url": url, "tokenizer": tokenizer, "tokenizer_backend": "huggingface", "max_length": 64}
found = lm_eval.simple_evaluate(
    model="local-completions", model_args=arguments, tasks=["tiny_choices"],
    task_manager=TaskManager(include_path=folder, include_defaults=False), batch_size=2, log_samples=True, bootstrap_iters=0,
)
samples = [{"doc": s["doc"], "resps": s["filtered_resps"]} for s in found["samples"]["tiny_choices"]]
print("RESULT" + json.dumps({"acc": found["results"]["tiny_choices"]["acc,none"], "samples": samples}))
"""


@pytest.mark.soak
def test_lm_eval_reads_the_chain_rule(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny", train_bpe(WORDS, 300))
    lm = load(folder)
    docs = [
        {"before": "the cat", "choices": [" sat", " dog", " naïve"], "answer": 0},
        {"before": "once upon a", "choices": [" time", " mat"], "answer": 1},
        {"before": "a dog and", "choices": [" a cat", " the", " €"], "answer": 2},
    ]
    (tmp_path / "docs.jsonl").write_text(
        "".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8"
    )
    (tmp_path / "tiny.yaml").write_text(
        TASK.replace("FILE", str(tmp_path / "docs.jsonl")), encoding="utf-8"
    )
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "OPENAI_API_KEY": "none",
    }
    with running(lambda: lm) as there:
        command = [
            sys.executable,
            "-c",
            EVALUATE,
            f"{there.url}/v1/completions",
            str(folder),
            str(tmp_path),
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, **offline},
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[6:]
    )
    right = 0
    for sample in result["samples"]:
        doc, sums = sample["doc"], []
        for choice, (told, greedy) in zip(doc["choices"], sample["resps"], strict=True):
            before, whole = (
                lm.tokenizer.encode(doc["before"]),
                lm.tokenizer.encode(doc["before"] + choice),
            )
            nothing = [False] * len(whole)
            scores = lm.score_tokens(whole, nothing, "ar")[len(before) :]
            likeliest = [top[0].token_id for top in lm.top_tokens(whole, nothing, 1, "ar")][
                len(before) :
            ]
            assert float(told) == pytest.approx(sum(scores), abs=1e-4)
            assert (greedy in (True, "True")) == (likeliest == whole[len(before) :])
            sums.append(sum(scores))
        right += sums.index(max(sums)) == doc["answer"]
    assert result["acc"] == pytest.approx(right / len(docs))


@pytest.mark.soak
def test_many_clients_get_what_the_library_gives(tmp_path: Path) -> None:
    """A short load run.

    It ends with code 1 if an answer differs that is no tie, at any error, or if rows stay taken.
    """
    folder = save_model(tmp_path / "tiny", train_bpe(WORDS, 300), max_length=128, n_layer=7)
    command = [
        sys.executable,
        "-m",
        "benchmarks.load",
        str(folder),
        "--minutes",
        "0.6",
        "--pool",
        "60",
        "--most",
        "200",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "errors: none; rows still held: 0" in done.stdout
    assert "64 clients" in done.stdout
