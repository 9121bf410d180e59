"""Ranks that each read the same data set, tokenizer and model at once, from an empty cache."""

import pytest

from tests.kernel.notebooks import open_notebook

pytest.importorskip("datasets")


@pytest.mark.timeout(240)
def test_ranks_that_map_one_data_set_get_the_same_rows(tmp_path):
    with open_notebook({"HF_HUB_OFFLINE": "1"}) as book:
        book.run(f"folder = {str(tmp_path)!r}")
        book.run(_WRITE)
        assert book.run(_READ, timeout=200).splitlines()[-1] == "same"


_WRITE = """
import json
import re
from pathlib import Path

import transformers
from notebook_accel import notebook_launcher
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

texts = [f"word{number % 7} and word{number % 11}" for number in range(500)]
rows = [json.dumps({"text": text, "labels": n % 2}) for n, text in enumerate(texts)]
Path(folder, "rows.json").write_text("\\n".join(rows))
tokenizer = BertTokenizerFast().train_new_from_iterator(texts, vocab_size=50, show_progress=False)
tokenizer.save_pretrained(f"{folder}/model")
shape = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
config = BertConfig(vocab_size=len(tokenizer), **shape)
BertForSequenceClassification(config).save_pretrained(f"{folder}/model")
"""

# The ranks of a session have all imported, so that in the calls after the first they read at once.
_READ = """
def read(cache):
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model")
    data = load_dataset(
        "json", data_files=f"{folder}/rows.json", split="train", cache_dir=f"{folder}/{cache}"
    )
    data = data.map(lambda batch: tokenizer(batch["text"], padding="max_length", max_length=8),
                    batched=True, batch_size=50, remove_columns="text")
    model = BertForSequenceClassification.from_pretrained(f"{folder}/model")
    loader = torch.utils.data.DataLoader(
        data.with_format("torch"), batch_size=100, num_workers=1
    )
    with torch.no_grad():
        losses = [model(**batch).loss.item() for batch in loader]
    return data["input_ids"][:], losses, len(data)

for number in range(5):
    run = notebook_launcher(read, args=(f"cache{number}",), num_processes=4, session=True)
    first, *others = run
    assert first[2] == 500 and all(other == first for other in others)
    found = re.findall(".*(?:forked|Error|corrupt).*", run.logs())
    assert not found, found
    assert list(Path(folder, f"cache{number}").glob("**/cache-*.arrow"))
print("same")
"""
