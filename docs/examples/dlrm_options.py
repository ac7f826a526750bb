"""The options of both twins, named as those of github.com/facebookresearch/dlrm where it has them.

Its own defaults make a model of three tables with two to four rows; these make one that learns.
"""

import argparse

from dlrm_criteo import KaggleFile, ProcessedFile
from dlrm_data import Clicks, RandomClicks


def widths(text: str) -> list[int]:
    return [int(width) for width in text.split("-")]


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split("-")]


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that both twins have."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = options.add_argument_group("model").add_argument
    add("--arch-sparse-feature-size", type=int, default=16, help="values a row")
    add("--arch-embedding-size", type=widths, default=[1000, 500, 200, 50], metavar="N-N-...",
        help="rows of each table, for random data")  # fmt: skip
    add("--arch-mlp-bot", type=widths, default=[13, 64, 16], metavar="N-N-...",
        help="widths of the bottom MLP, to a row; a file sets the first")  # fmt: skip
    add("--arch-mlp-top", type=widths, default=[64, 1], metavar="N-N-...",
        help="widths of the top MLP after its input")  # fmt: skip
    add("--arch-interaction-op", choices=["dot", "cat"], default="dot", help="how vectors meet")
    add("--arch-interaction-itself", action="store_true", help="each meets itself, too")
    add = options.add_argument_group("data").add_argument
    add("--data-generation", choices=["random", "dataset"],
        help="dataset is what comes of naming a file")  # fmt: skip
    add("--raw-data-file", help="Criteo's Kaggle TSV; gzipped if it ends in .gz")
    add("--processed-data-file", help="the .npz that DLRM makes of it; needs NumPy")
    add("--max-ind-range", type=int, default=-1,
        help="rows of every table, the modulus of ids; -1 counts categories")  # fmt: skip
    add("--min-count", type=int, default=1, help="rarer categories share row 0, when counted")
    add("--num-batches", type=int, default=0, help="batches an epoch; 0: all (random data: 200)")
    add("--mini-batch-size", type=int, default=128, help="samples, of all trainers together")
    add("--test-mini-batch-size", type=int, default=1024, help="samples, of one trainer")
    add("--num-indices-per-lookup", type=int, default=4, help="ids in a bag at most, random data")
    add("--num-indices-per-lookup-fixed", action="store_true", help="exactly so many")
    add("--numpy-rand-seed", "--seed", type=int, default=123, help="of random data")
    add = options.add_argument_group("training").add_argument
    add("--loss-function", choices=["bce", "wbce", "mse"], default="bce", help="the loss")
    add("--loss-weights", type=numbers, default=[1.0, 1.0], metavar="X-X",
        help="of the labels 0 and 1, for wbce")  # fmt: skip
    add("--nepochs", type=int, default=1, help="passes over the data")
    add("--learning-rate", type=float, default=0.1, help="of the dense half")
    add("--sparse-learning-rate", type=float, help="of the tables; if not given, the same")
    optimizers = ["sgd", "adagrad", "rowwise_adagrad"]
    add("--dense-optimizer", choices=optimizers[:2], default="sgd", help="of the dense half")
    add("--sparse-optimizer", choices=optimizers, default="sgd", help="of the tables")
    return options


def parsed(options: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, checked, and ``data``, what they choose."""
    args = options.parse_args()
    files = [args.raw_data_file, args.processed_data_file]
    if args.data_generation is None:
        args.data_generation = "dataset" if any(files) else "random"
    if (args.data_generation == "dataset") != (sum(map(bool, files)) == 1):
        options.error(
            "--data-generation dataset takes a --raw-data-file or a --processed-data-file"
        )
    if args.min_count != 1 and (args.max_ind_range > 0 or not args.raw_data_file):
        options.error("--min-count is for --raw-data-file without --max-ind-range")
    if args.arch_mlp_bot[-1] != args.arch_sparse_feature_size:
        options.error("--arch-mlp-bot must end with --arch-sparse-feature-size")
    if args.arch_mlp_top[-1] != 1:
        options.error("--arch-mlp-top must end with 1")
    if args.sparse_learning_rate is None:
        args.sparse_learning_rate = args.learning_rate
    args.data = _data(args)
    args.arch_mlp_bot[0] = args.data.num_dense
    return args


def _data(args: argparse.Namespace) -> Clicks:
    if args.raw_data_file:
        return KaggleFile(args.raw_data_file, args.max_ind_range, args.min_count)
    if args.processed_data_file:
        return ProcessedFile(args.processed_data_file, args.max_ind_range)
    limit = args.max_ind_range if args.max_ind_range > 0 else max(args.arch_embedding_size)
    num_train = (args.num_batches or 200) * args.mini_batch_size
    return RandomClicks(
        num_samples=num_train + num_train // 6,  # a seventh of all for testing
        num_dense=args.arch_mlp_bot[0],
        table_sizes=[min(size, limit) for size in args.arch_embedding_size],
        num_indices=args.num_indices_per_lookup,
        fixed=args.num_indices_per_lookup_fixed,
        seed=args.numpy_rand_seed,
    )


def described(epoch: int, result: dict[str, float]) -> str:
    """An epoch's line of output."""
    test = ", ".join(f"{name} {result[name]:.5f}" for name in ("AUC", "accuracy", "log loss"))
    return f"epoch {epoch}: train loss {result['train loss']:.6f}, test {test}"
