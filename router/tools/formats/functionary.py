"""Functionary, and Llama 3 with custom tools. Pure."""

from loraplex.router.tools.formats.named_calls import NamedCalls

# 3.1: <function=name>{…}</function>
FUNCTIONARY = NamedCalls(
    "functionary",
    ("<function=", "</function>"),
    open="<function=",
    middle=">",
    close="</function>",
)
# 3.2: >>>all\ntext>>>name\n{…}
FUNCTIONARY_V3 = NamedCalls("functionary_v3", (">>>",), open=">>>", middle="\n", to_user="all\n")
