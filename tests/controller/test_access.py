"""Links to the page: each opens it once, and those that nobody opens do not pile up."""

from trimtab.controller.console.access import MAX_LINKS, Access


def test_a_link_opens_once() -> None:
    access = Access("bearer", 8000)
    token = access.new_link_token()
    assert access.redeem(token) is not None
    assert access.redeem(token) is None
    assert access.redeem("made up") is None


def test_a_new_link_ends_the_oldest_unused_one() -> None:
    access = Access("bearer", 8000)
    tokens = [access.new_link_token() for _ in range(MAX_LINKS + 1)]
    assert access.redeem(tokens[0]) is None
    assert all(access.redeem(token) is not None for token in tokens[1:])
