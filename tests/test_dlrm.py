"""The DLRM example: the same figures as its plain twin, on random data and on Criteo's."""

from __future__ import annotations

import gzip
import itertools
import os
import pickle
import subprocess
import sys
from argparse import Namespace

import pytest
import torch

from example_runs import EXAMPLES, module, run, shared

ADAGRAD = ["--dense-optimizer", "adagrad", "--sparse-optimizer", "adagrad"]
AS_DOCUMENTED = ["--learning-rate", 0.02, *ADAGRAD, "--min-count", 10, "--nepochs", 2]
SMALL = ["--num-batches", 12, "--learning-rate", 0.05]


def agree(ours, plain):
    assert len(ours) == len(plain)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine["train loss"] == pytest.approx(theirs["train loss"], rel=0, abs=1e-5)
        assert mine["log loss"] == pytest.approx(theirs["log loss"], rel=0, abs=1e-5)
        assert mine["AUC"] == pytest.approx(theirs["AUC"], rel=0, abs=1e-4)
        assert mine["accuracy"] == pytest.approx(theirs["accuracy"], rel=0, abs=1e-9)


@pytest.fixture
def criteo():
    return shared("HYBRIDPAR_CRITEO", "criteo/day_tiny.tsv")


@pytest.fixture
def lines(tmp_path):
    """A made-up file: 70 lines in Criteo's form, some fields empty, in line 1 a great category."""
    draw = torch.Generator().manual_seed(0)

    def field(most, form):
        value = int(torch.randint(most, (), generator=draw))
        return "" if value % 5 == 0 else form % value

    rows = [
        [
            str(n % 3 // 2),
            *(field(40, "%d") for _ in range(13)),
            *(field(9, "%08x") for _ in "x" * 26),
        ]
        for n in range(70)
    ]
    rows[0][1], rows[0][14] = "-3", "ffffffff"
    path = tmp_path / "train.txt"
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("world", "options"),
    [
        ((2, 2), ["--arch-interaction-itself", "--sparse-optimizer", "rowwise_adagrad"]),
        ((1, 1), ["--arch-interaction-op", "cat", "--loss-function", "mse"]),
        ((2, 1), ["--loss-function", "wbce", "--loss-weights", "0.5-2", "--max-ind-range", 100]),
    ],
    ids=str,
)
def test_twins_agree_on_random_data(world, options):
    trainers, servers = world
    ours = run("dlrm", *SMALL, *options, "--trainers", trainers, "--servers", servers)
    agree(ours, run("dlrm_plain", *SMALL, *options))


def test_random_data_can_be_learned():
    assert run("dlrm_plain")[-1]["AUC"] > 0.64  # 0.656; 0.5 is chance


def test_twins_agree_on_criteo_across_a_resume(criteo, tmp_path):
    """As documented: two trainers, two servers; but stopped after an epoch and resumed."""
    plain = run("dlrm_plain", "--raw-data-file", criteo, *AS_DOCUMENTED)
    options = ["--raw-data-file", criteo, *AS_DOCUMENTED, "--trainers", 2, "--servers", 2]
    options += ["--checkpoint-dir", tmp_path / "checkpoints", "--resume"]
    ours = run("dlrm", *options, "--nepochs", 1)
    ours += run("dlrm", *options, "--export", tmp_path / "dlrm.pt")
    agree(ours, plain)
    assert ours[-1]["AUC"] > 0.7
    saved = torch.load(tmp_path / "dlrm.pt", weights_only=False)
    test = next(saved["data"].test(1000))
    with torch.no_grad():
        auc = module("movielens_data").auc(saved["model"](test), test.labels)
    assert auc == pytest.approx(ours[-1]["AUC"], abs=1e-4)


def test_an_exported_model_scores_lines_elsewhere(lines, tmp_path):
    run("dlrm", "--raw-data-file", lines, "--mini-batch-size", 10, "--export", tmp_path / "dlrm.pt")
    program = (
        "import sys, torch\n"
        "saved = torch.load(sys.argv[1], weights_only=False)\n"
        "batch = saved['data'].batch([(1, open(sys.argv[2]).readline())])\n"
        "print(saved['model'](batch).sigmoid().item())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "dlrm.pt", lines],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert 0 < float(done.stdout) < 1


@pytest.mark.parametrize(("num_trainers", "size"), [(1, 8), (2, 8), (3, 9)])
def test_shares_make_up_the_batches_and_the_test_samples(lines, num_trainers, size):
    data = module("dlrm_criteo").KaggleFile(lines)
    ranks = range(num_trainers)
    whole = list(data.train(size))
    shares = [list(data.train(size, rank, num_trainers)) for rank in ranks]
    assert len(whole) == 60 // size  # 10 of 70 are for testing
    for batch, *parts in zip(whole, *shares, strict=True):
        assert torch.cat([part.dense for part in parts]).equal(batch.dense)
        assert torch.cat([part.ids[3] for part in parts]).equal(batch.ids[3])
    tested = [list(data.test(3, rank, num_trainers)) for rank in ranks]
    labels = [b.labels for bs in itertools.zip_longest(*tested) for b in bs if b is not None]
    assert torch.cat(labels).equal(torch.cat([batch.labels for batch in data.test(10)]))
    assert sum(map(len, labels)) == 10


def test_a_gzipped_file_is_the_same(lines, tmp_path):
    packed = tmp_path / "train.txt.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    files = [module("dlrm_criteo").KaggleFile(path) for path in (lines, packed)]
    first, second = (next(file.train(60)) for file in files)
    assert first.dense.equal(second.dense)
    assert all(a.equal(b) for a, b in zip(first.ids, second.ids, strict=True))


def test_a_category_over_two_to_the_31_keeps_all_its_bits(lines):
    batch = next(module("dlrm_criteo").KaggleFile(lines, max_ind_range=1000).train(60))
    assert batch.ids[0][0] == 0xFFFFFFFF % 1000
    assert batch.dense[0, 0] == 0  # -3 counts as 0


def test_counted_rows_follow_the_training_lines(lines):
    text = [line.split("\t") for line in lines.read_text().splitlines()]
    everything = module("dlrm_criteo").KaggleFile(lines)
    often = module("dlrm_criteo").KaggleFile(lines, min_count=3)
    for column in range(26):
        seen = [int(row[14 + column] or "0", 16) for row in text[:60]]
        order = list(dict.fromkeys(seen))
        expected = [1 + order.index(category) for category in seen]
        assert next(everything.train(60)).ids[column].tolist() == expected
        kept = [category for category in order if seen.count(category) >= 3]
        expected = [1 + kept.index(c) if c in kept else 0 for c in seen]
        assert next(often.train(60)).ids[column].tolist() == expected
        assert often.table_sizes[column] == 1 + len(kept)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda line: line + "\t1", r"line 5: it has 41 fields"),
        (lambda line: line.replace("\t", "\tno", 1), r"line 5: invalid literal for int\(\)"),
    ],
)
def test_a_line_of_another_form_is_named(lines, spoil, complaint):
    text = lines.read_text().splitlines()
    text[4] = spoil(text[4])
    lines.write_text("\n".join(text))
    with pytest.raises(ValueError, match=complaint):
        module("dlrm_criteo").KaggleFile(lines)


def test_dlrms_npz_gives_the_same_batches(lines, tmp_path):
    numpy = pytest.importorskip("numpy")
    raw = module("dlrm_criteo").KaggleFile(lines)
    batches = [*raw.train(60), *raw.test(10)]
    text = [line.split("\t") for line in lines.read_text().splitlines()]
    numpy.savez(
        tmp_path / "processed.npz",
        X_int=numpy.array([[max(int(x or 0), 0) for x in row[1:14]] for row in text], "int32"),
        X_cat=torch.cat([torch.stack(batch.ids, 1) for batch in batches]).int().numpy(),
        y=numpy.array([int(row[0]) for row in text], "int32"),
        counts=numpy.array(raw.table_sizes, "int32"),
    )
    processed = module("dlrm_criteo").ProcessedFile(tmp_path / "processed.npz")
    assert processed.table_sizes == raw.table_sizes
    for ours, theirs in zip([*processed.train(60), *processed.test(10)], batches, strict=True):
        assert ours.dense.equal(theirs.dense)
        assert ours.labels.equal(theirs.labels)
        assert all(a.equal(b) for a, b in zip(ours.ids, theirs.ids, strict=True))
    assert len(pickle.dumps(processed)) < 1000, "an export would hold the samples"
    hashed = module("dlrm_criteo").ProcessedFile(tmp_path / "processed.npz", max_ind_range=5)
    assert next(hashed.train(60)).ids[0].equal(batches[0].ids[0] % 5)
    assert max(hashed.table_sizes) == 5


@pytest.mark.parametrize("itself", [False, True])
def test_the_interaction_is_the_lower_triangle_of_the_gram_matrix(itself):
    args = Namespace(
        arch_interaction_op="dot",
        arch_interaction_itself=itself,
        arch_sparse_feature_size=4,
        arch_mlp_bot=[3, 4],
        arch_mlp_top=[1],
    )
    half = module("dlrm_model").DenseHalf(args, num_tables=2)
    dense, *embeddings = torch.randn(5, 3), torch.randn(5, 4), torch.randn(5, 4)
    x = half.bottom(dense)
    vectors = [x, *embeddings]
    products = [
        (vectors[i] * vectors[j]).sum(1) for i in range(3) for j in range(i + 1 if itself else i)
    ]
    expected = half.top(torch.cat([x, torch.stack(products, 1)], 1)).squeeze(1)
    assert torch.allclose(half(dense, embeddings), expected, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        ["--arch-mlp-bot", "13-8"],
        ["--arch-mlp-top", "8-2"],
        ["--min-count", 2],
        ["--data-generation", "dataset"],
        ["--resume"],
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        run("dlrm", *options)
    assert options[0] in capsys.readouterr().err
