"""anthropic, litellm, LangChain and openai's Responses with an image, read from stdin: all get one
answer."""

import base64
import os
import sys
from typing import Any

# litellm asks for a list of prices over the network otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import anthropic
import litellm
import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from tests.e2e.clients.asking import KEY, check

MODEL, ASKED, MOST = "one", "What is this?", 12
KIND = "image/jpeg"
DATA = base64.b64encode(sys.stdin.buffer.read()).decode()
URL = f"data:{KIND};base64,{DATA}"
PARTS: Any = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": ASKED}]


def by_anthropic(url: str) -> Any:
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    source = {"type": "base64", "media_type": KIND, "data": DATA}
    content = [{"type": "image", "source": source}, {"type": "text", "text": ASKED}]
    messages = [{"role": "user", "content": content}]
    answer = client.messages.create(
        model=MODEL, max_tokens=MOST, messages=messages, extra_body={"temperature": 0}
    )
    counted = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    usage = answer.usage
    check(counted == usage.input_tokens + (usage.cache_read_input_tokens or 0), "input tokens")
    return answer.content[0].text


def by_litellm(url: str) -> Any:
    answer = litellm.completion(
        model=f"hosted_vllm/{MODEL}",
        api_base=f"{url}/v1",
        api_key=KEY,
        messages=[{"role": "user", "content": PARTS}],
        temperature=0,
        max_tokens=MOST,
        num_retries=0,
    )
    return answer.choices[0].message.content


def by_langchain(url: str) -> Any:
    chat = ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key=KEY,
        temperature=0,
        max_tokens=MOST,
        max_retries=0,
    )
    content = [
        {"type": "image", "base64": DATA, "mime_type": KIND},
        {"type": "text", "text": ASKED},
    ]
    streamed = "".join(chunk.text for chunk in chat.stream([HumanMessage(content)]))
    whole = chat.invoke([HumanMessage(PARTS)]).text
    check(streamed == whole, f"streamed {streamed!r}, whole {whole!r}")
    return whole


def by_openai(url: str) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    content: Any = [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": ASKED},
    ]
    said: Any = [{"role": "user", "content": content}]
    answer = client.responses.create(
        model=MODEL,
        input=said,
        temperature=0,
        max_output_tokens=MOST,
    )
    messages: Any = [{"role": "user", "content": PARTS}]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=MOST
    )
    check(answer.output_text == chat.choices[0].message.content, "responses and chat")
    return answer.output_text


if __name__ == "__main__":
    ways = (by_openai, by_anthropic, by_litellm, by_langchain)
    answers = {way.__name__: way(sys.argv[1]) for way in ways}
    check(len(set(answers.values())) == 1, f"answers: {answers}")
