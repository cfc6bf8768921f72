"""Functionary 3.1, and Llama 3 with custom tools. Pure."""

from router.tools.formats.named_calls import NamedCalls

# <function=name>{…}</function>
FUNCTIONARY = NamedCalls(
    "functionary",
    ("<function=", "</function>"),
    open="<function=",
    middle=">",
    close="</function>",
)
