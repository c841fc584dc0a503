"""Options that are refused: one line names the value, and what is accepted or to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specache_compile.errors import OptionError
from specache_compile.methods import parse_options
from specache_compile.methods.field import LayerShape
from specache_compile.methods.slots import pairs_to_fetch

REFUSED: list[tuple[Any, str]] = [
    (["bits"], r"options=\['bits'\]: pass a dict, such as {'bits': 2}"),
    ({"method": "pyramidkv"}, "method='pyramidkv': accepted are 'full', 'offload', 'kivi', 'specache', 'pages'"),
    ({"method": ["h2o"]}, "method=.*h2o.*: accepted are 'full'"),
    ({"method": "h2o", "bits": 1}, "option bits: method 'h2o' accepts only method, .*budget, eviction_block"),
    ({"method": "kivi", "top_k": 8}, "option top_k: method 'kivi' accepts only"),
    ({"budget": 100}, "option budget: method 'specache' accepts only"),
    *(({"method": "roco", "budget": n}, f"budget={n!r}: give a number of pairs, or a rate") for n in (0, 1.5, "8")),
    ({"method": "roco", "eviction_block": 0}, "eviction_block=0: accepted is an integer, 1 or more, or 'prompt'"),
    ({"method": "snapkv", "kernel": 4}, "kernel=4: give an odd number of tokens, 1 or more"),
    ({"key_bits": 16}, "key_bits was removed: bits sets both"),
    ({"selector": "pages"}, "selector was removed: method='pages'"),
    ({"page_size": 4}, "page_size was removed: it is an option of method='pages'"),
    ({"lookup": True}, "lookup was removed: pass prompt_lookup_num_tokens"),
    ({"method": "pages", "page_size": 32, "top_k": 16}, "page_size=32: a page does not fit top_k=16"),
    ({"bitz": 2}, "unknown option 'bitz': accepted are method, .*bits, .*center, .*group_size"),
    ({"bits": True}, "bits=True: accepted are 1, 1.5, 2, 4, 8, 16"),
    ({"top_k": 1.5}, "top_k=1.5: accepted is an integer, 0"),
    ({"zero_point": "mid"}, "zero_point='mid': accepted are 'midpoint', 'minimum', 'middles'"),
    ({"speculate": 1}, "speculate=1: accepted are True, False"),
    ({"rotate": False}, "rotate was removed: method='specache' rotates, except with setting='paper'"),
    ({"bits": 2, "value_code": "trellis"}, "value_code='trellis' requires values of 1 bit"),
    ({"key_code": "lattice"}, "key_code='lattice': accepted are 'levels', 'trellis', 'auto'"),
    ({"key_code": "trellis"}, "key_code='trellis' requires keys of 1 bit, not 2"),
    *(({"sink_tokens": n}, f"sink_tokens={n}: accepted is an integer, 0 to 64") for n in (-1, 65, True)),
    (
        {"sink_tokens": 64, "group_size": 32, "residual_length": 8},
        r"sink_tokens=64: more than the window of 40 tokens \(residual_length 8 \+ group_size 32\). Pass fewer",
    ),
    ({"skip_below": 0.1}, "skip_below=0.1: accepted is a number from 0 to 0.01"),
    ({"host_bits": 4}, "host_bits=4: accepted are 16, 8, 'auto'"),
    ({"host_bits": 8, "verify": 16}, "verification needs exact pairs. Pass host_bits=16"),
    ({"host_bits": 8, "bits": 16}, "pairs must be exact. Pass host_bits=16"),
    ({"host_bits": 8, "top_k": 0, "host_tier": False}, "there is no host tier. Leave"),
    ({"host_tier": False}, "host_tier=False with top_k=auto.*top_k=0"),
    ({"host_tier": False, "top_k": 0, "verify": 4}, "host_tier=False with verify=4"),
    ({"method": "kivi", "host_tier": 0.5}, "host_tier=0.5"),
    *(({"verify": n}, "1 to 1024, or 'auto', or None") for n in (0, -1, 1025, True, 2.0, "often")),
    *(({"min_context": value}, f"min_context={value!r}") for value in (-1, "yes", 2.0, None, True)),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_bad_options_are_refused_in_a_line(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as error:
        parse_options(options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("heads", "pairs"), [(1, 256), (2, 128), (3, 64), (8, 64)])
def test_few_kv_heads_select_more_pairs_each_on_any_number_of_ranks(heads: int, pairs: int) -> None:
    shapes = (LayerShape(heads // n, 64, torch.float32, torch.device("cpu"), ranks=n) for n in (1, heads))
    assert {pairs_to_fetch(parse_options({}), shape) for shape in shapes} == {pairs}
