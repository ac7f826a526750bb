"""Train DLRM, its tables on parameter servers.

    python dlrm.py                                      # random data
    python dlrm.py --raw-data-file train.txt --trainers 2 --servers 2

dlrm_plain.py is plain torch in one process. Both print the same figures.
"""

import itertools

import torch
from dlrm_hybrid import DLRM
from dlrm_model import loss
from dlrm_options import described, parsed, parser
from trainer_mean import mean_over_trainers

import hybridpar as hp
from hybridpar.metrics import AUC, Accuracy, LogLoss

DENSE = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
SPARSE = {
    "sgd": hp.optim.SGD,
    "adagrad": hp.optim.Adagrad,
    "rowwise_adagrad": hp.optim.RowWiseAdagrad,
}


def train(ctx, args):
    data = args.data
    checkpoint = None
    if args.checkpoint_dir:
        checkpoint = hp.Checkpoint(args.checkpoint_dir, every=args.checkpoint_every)
    loop = hp.TrainerLoop(
        DLRM(args),
        ctx,
        loss=lambda output, batch: loss(args, output, batch.labels),
        dense_optimizer=lambda params: DENSE[args.dense_optimizer](params, lr=args.learning_rate),
        sparse_optimizer=SPARSE[args.sparse_optimizer](lr=args.sparse_learning_rate),
        consistency=args.consistency,
        staleness=args.staleness,
        checkpoint=checkpoint,
    )

    def batches(epoch):
        mine = data.train(args.mini_batch_size, ctx.rank, ctx.num_trainers)
        return itertools.islice(mine, args.num_batches or None)

    results, resume = [], args.resume
    for epoch in range(1, args.nepochs + 1):
        result = loop.fit(batches, epochs=epoch if resume else 1, resume=resume)
        if resume and not result.steps:
            continue  # a checkpoint has this epoch
        resume = False
        found = loop.evaluate(
            data.test(args.test_mini_batch_size, ctx.rank, ctx.num_trainers),
            metrics={"AUC": AUC(), "accuracy": Accuracy(), "log loss": LogLoss()},
            inputs=lambda output, batch: (output.sigmoid(), batch.labels),
        )
        mean = mean_over_trainers(result.epoch_losses[-1], ctx.num_trainers)
        results.append({"train loss": mean, **found})
        if ctx.rank == 0:
            print(described(epoch, results[-1]), flush=True)
    if args.export and ctx.rank == 0:
        export(loop.model, args)
    return results


def export(model, args):
    """Write the model as a plain module, with what makes batches of Criteo's lines; score it."""
    exported = model.export()
    torch.save({"model": exported, "data": args.data}, args.export)
    auc = AUC()
    with torch.no_grad():
        for batch in args.data.test(args.test_mini_batch_size):
            auc.update(exported(batch), batch.labels)
    print(f"exported to {args.export}: test AUC {auc.compute():.5f}", flush=True)


def main():
    options = parser(__doc__.splitlines()[0])
    add = options.add_argument_group("hybridpar").add_argument
    add("--trainers", type=int, default=2, help="processes that train")
    add("--servers", type=int, default=1, help="processes that hold the tables")
    add("--consistency", choices=["sync", "async", "bounded"], default="sync", help="of the rows")
    add("--staleness", type=int, help="for bounded: steps that rows may lack")
    add("--checkpoint-dir", help="where to save")
    add("--checkpoint-every", type=int, help="steps between two; if not given, every epoch")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--export", metavar="PATH", help="write the trained model there, as a plain module")
    args = parsed(options)
    if args.resume and not args.checkpoint_dir:
        options.error("--resume needs --checkpoint-dir")
    roles = hp.Roles(trainers=args.trainers, servers=args.servers)
    return hp.launch(train, roles=roles, args=(args,), device="cpu")[0]


if __name__ == "__main__":
    main()
