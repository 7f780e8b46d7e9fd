"""Learning from preferences: a step of DPO, and steps of GRPO with sampling, reward and reference on one mesh.

python examples/loops/preferences.py --mesh tp=2             # two processes: policy, reference and reward share them
python examples/loops/preferences.py --mesh dp=2 --steps 4

Each loss and each gradient is compared with plain PyTorch on the same samples.

DPO: Rafailov et al. 2023, arXiv:2305.18290. GRPO: Shao et al. 2024, arXiv:2402.03300 (one update for each sample, so
that the ratio of probabilities is 1 and its clipping has no effect).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from small import VOCABULARY, Texts, main
from torch import Tensor, nn

import quintnet

BETA, PROMPT, NEW, GROUP, PROMPTS = 0.1, 4, 6, 4, 2


def language_model(seed: int) -> Any:
    """A GPT-2 of two layers in float64, in which it computes all of its layers."""
    torch.manual_seed(seed)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, **dropout, use_cache=False, tie_word_embeddings=False)
    return transformers.GPT2LMHeadModel(config).double()


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Of each token after the first [rows, length - 1]."""
    return -F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


class DPO(nn.Module):
    """The loss of pairs of answers; the reference is frozen."""

    def __init__(self, policy: Any, reference: Any) -> None:
        super().__init__()
        self.policy, self.reference = policy, reference.requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Token ids, both [rows, length]; the first tokens are the prompt."""
        better, worse = (
            log_probs(self.policy(ids).logits, ids)[:, PROMPT - 1 :].sum(1)
            - log_probs(self.reference(ids).logits, ids)[:, PROMPT - 1 :].sum(1)
            for ids in (chosen, rejected)
        )
        return -F.logsigmoid(BETA * (better - worse)).mean()


class GRPO(nn.Module):
    """The loss of sampled answers, given their advantages; with the reference, which is frozen."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        self.reference = reference.requires_grad_(False)

    def forward(self, outputs: Any, answers: dict[str, Tensor]) -> Tensor:
        """``answers``: ids [rows, length] and advantages [rows]."""
        ids = answers["ids"]
        now = log_probs(outputs.logits, ids)[:, PROMPT - 1 :]
        known = log_probs(self.reference(ids).logits, ids)[:, PROMPT - 1 :]
        ratio = torch.exp(now - now.detach())
        distance = torch.exp(known - now) - (known - now) - 1  # an estimate of the KL divergence that is never negative
        return -(ratio * answers["advantages"][:, None] - BETA * distance).mean()


class Reward(nn.Module):
    """Scores of texts [rows]; in practice a trained model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.score = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.score(self.embed(ids).mean(1))).squeeze(1)


def advantages(rewards: Tensor) -> Tensor:
    """Of each answer among those to the same prompt."""
    groups = rewards.view(PROMPTS, GROUP)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def difference(program: quintnet.CompiledProgram, loss: Tensor, plain: nn.Module, expected: Tensor) -> float:
    """The largest of loss and gradients, relative."""
    expected.backward()
    known_loss = float(expected.detach())
    worst = abs(float(loss) - known_loss) / max(abs(known_loss), 1.0)  # that of GRPO is near 0
    known = dict(plain.named_parameters())
    for name, p in program.named_parameters():
        if p.grad is not None:
            x = known[name].grad
            assert x is not None, name
            worst = max(worst, float((p.grad.full_tensor() - x).norm() / x.norm()))
    return worst


def dpo(mesh: quintnet.Mesh) -> float:
    """One step; how far it is from plain PyTorch."""
    model = DPO(language_model(0), language_model(1))
    plain = copy.deepcopy(model)
    batch = (Texts(4, PROMPT + NEW).ids, Texts(4, PROMPT + NEW, seed=3).ids)
    program = quintnet.compile(model, mesh, batch)
    return difference(program, program.step(batch), plain, plain(*batch))


def grpo(mesh: quintnet.Mesh, steps: int) -> tuple[list[float], float]:
    """The mean rewards of the steps, and how far any of them is from plain PyTorch."""
    policy, reference = (language_model(0) for _ in range(2))
    prompts = Texts(PROMPTS, PROMPT).ids.repeat_interleave(GROUP, 0)
    reward = quintnet.compile(Reward().double(), mesh, (prompts,), training=False)
    ids = F.pad(prompts, (0, NEW))
    example = (ids, {"ids": ids, "advantages": torch.zeros(len(ids), dtype=torch.float64)})
    empty = copy.deepcopy(policy).to("meta", torch.float32)  # samples are made with fewer digits than are trained
    rollout = quintnet.compile(empty, mesh, {"input_ids": ids}, training=False)
    program = quintnet.compile(policy, mesh, example, loss_fn=GRPO(reference))
    optimizer = torch.optim.AdamW([p for p in program.parameters() if p.requires_grad], lr=1e-2)
    plain, plain_loss = language_model(0), GRPO(language_model(0))
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    found, worst = list[float](), 0.0
    for step in range(steps):
        rollout.copy_parameters(program)
        ids = rollout.generate(prompts, max_new_tokens=NEW, do_sample=True, seed=step)
        rewards = reward(ids)
        answers = {"ids": ids, "advantages": advantages(rewards)}
        loss = program.step((ids, answers))
        worst = max(worst, difference(program, loss, plain, plain_loss(plain(ids), answers)))
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()
        found.append(float(rewards.mean()))
    return found, worst


def run(mesh: quintnet.Mesh, steps: int) -> str:
    exact = dpo(mesh)
    rewards, worst = grpo(mesh, steps)
    return f"DPO differs by {exact:.1e}, GRPO by {worst:.1e}; mean rewards {[round(x, 3) for x in rewards]}"


if __name__ == "__main__":
    main(__doc__, run, steps=3)
