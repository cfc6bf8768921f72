"""DeepSeek. Pure."""

from loraplex.router.tools.formats.named_calls import NamedCalls

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_OPEN, _SEP, _CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_MARKERS = _BEGIN, _OPEN, _SEP, _CLOSE, _END

# V3 and R1: each call is <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, then arguments in a fence
DEEPSEEK_V3 = NamedCalls(
    "deepseek_v3",
    _MARKERS,
    open=f"{_OPEN}function{_SEP}",
    middle="\n```json\n",
    close=f"\n```{_CLOSE}",
    begin=_BEGIN,
    end=_END,
    between="\n",
)
# V3.1: <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
DEEPSEEK_V31 = NamedCalls(
    "deepseek_v31", _MARKERS, open=_OPEN, middle=_SEP, close=_CLOSE, begin=_BEGIN, end=_END
)
