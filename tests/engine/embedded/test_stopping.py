"""Stop strings across any token borders."""

from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine.embedded.stopping import StopMatcher


def feed(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    matcher, sent = StopMatcher(stops), ""
    for piece in pieces:
        safe, stopped = matcher.push(piece)
        sent += safe
        if stopped:
            return sent, True
    return sent + matcher.flush(), False


@given(
    pieces=st.lists(st.text("ab", min_size=0, max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_the_text_ends_before_a_stop_string_wherever_the_pieces_part(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    sent, stopped = feed(stops, pieces)
    text = "".join(pieces)
    assert stopped == any(stop in text for stop in stops)
    assert text.startswith(sent)
    assert not any(stop in sent for stop in stops)
    if not stopped:
        assert sent == text


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    matcher = StopMatcher(("\n\nUser:",))
    assert matcher.push("Hello\n") == ("Hello", False)
    assert matcher.push("\nUs") == ("", False)
    assert matcher.push("eful") == ("\n\nUseful", False)
    assert matcher.push("\n\nUser: hi") == ("", True)
