"""Train with checkpoints, go on after a kill, evaluate, export; then score without any server.

    python movielens_served.py train ml-100k out --servers 1
    python movielens_served.py score ml-100k out

Kill the first command at any moment and give it again, with other numbers of trainers and servers
if you like: it goes on from the newest checkpoint. The second one reads the exported model, and
prints the same AUC.
"""

import argparse
from pathlib import Path

import torch
from movielens import BATCH_SIZE, Recommender, loss
from movielens_data import MovieLens

import hybridpar as hp
from hybridpar.metrics import AUC


def scores(logits, batch):
    return torch.sigmoid(logits), batch.labels


def train(ctx, data, directory, epochs):
    loop = hp.TrainerLoop(
        Recommender(data),
        ctx,
        loss=loss,
        dense_optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
        sparse_optimizer=hp.optim.Adagrad(lr=0.2),
        checkpoint=hp.Checkpoint(directory / "checkpoints", every=20, keep=2),
    )
    done = loop.fit(
        lambda epoch: data.batches(BATCH_SIZE, epoch, ctx.rank, ctx.num_trainers),
        epochs=epochs,
        resume=True,
        eval_batches=[data.test_share(ctx.rank, ctx.num_trainers)],
        metrics={"AUC": AUC()},
        inputs=scores,
    )
    if ctx.rank == 0:
        torch.save(loop.model.export(), directory / "model.pt")
    return done.evaluations[-1].results["AUC"]


@torch.no_grad()
def score_all(data, directory):
    model = torch.load(directory / "model.pt", weights_only=False).eval()
    metric = AUC()
    metric.update(*scores(model(data.test), data.test))
    return metric.compute()


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "score"])
    parser.add_argument("path", help="directory of MovieLens-100K")
    parser.add_argument("directory", type=Path, help="for checkpoints and the exported model")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    args = parser.parse_args()
    data = MovieLens(args.path)
    if args.what == "score":
        auc = score_all(data, args.directory)
    else:
        roles = hp.Roles(trainers=args.trainers, servers=args.servers)
        settings = (data, args.directory, args.epochs)
        auc = hp.launch(train, roles=roles, args=settings, device="cpu")[0]
    print(f"test AUC {auc:.6f}")
    return auc


if __name__ == "__main__":
    main()
