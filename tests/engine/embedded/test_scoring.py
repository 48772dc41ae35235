"""Log-probabilities against torch's own log_softmax."""

import torch

from trimtab.engine.embedded.scoring import TokenScores, score


def test_scores_equal_log_softmax_and_ranks_count_the_better_ones() -> None:
    logits = torch.randn(150, 77, generator=torch.Generator().manual_seed(3)) * 4
    tokens = [i % 77 for i in range(150)]
    scores = score(logits, tokens, 20)
    reference = torch.log_softmax(logits.double(), dim=-1)
    for row, token in enumerate(tokens):
        # float32 log-sum-exp of values below 20 errs by a few units of 1e-6.
        assert abs(scores.logprobs[row] - reference[row, token].item()) < 1e-5
        assert scores.ranks[row] == 1 + (reference[row] > reference[row, token]).sum().item()
        values, indices = reference[row].topk(20)
        assert scores.top_ids[row].tolist() == indices.tolist()
        assert abs(torch.tensor(scores.top_logprobs[row]) - values).max() < 1e-5


def test_scores_can_be_cut_and_joined() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(3))
    whole = score(logits, [0, 1, 2, 3, 4, 5], 2)
    joined = TokenScores.joined([score(logits[:2], [0, 1], 2), score(logits[2:], [2, 3, 4, 5], 2)])
    assert joined.top_ids.tolist() == whole.top_ids.tolist()
    assert len(joined.first(4)) == 4
    assert joined.first(4).token_ids.tolist() == [0, 1, 2, 3]


def test_no_top_entries_is_allowed() -> None:
    assert score(torch.zeros(2, 5), [1, 2], 0).top_ids.shape == (2, 0)
