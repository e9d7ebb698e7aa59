"""The official OpenAI client against a mesh, unchanged: chat, completions, models,
streams, usage and errors as typed exceptions. Arguments: base URL, model, alias."""

import sys

import openai

base, model, alias = sys.argv[1:4]
client = openai.OpenAI(base_url=base, api_key="unused", max_retries=0)


def raises(kind, call, param=None, code=None):
    try:
        call()
    except kind as e:
        assert type(e) is kind, f"{type(e)} instead of {kind}"
        assert param is None or e.param == param, f"param {e.param!r}, want {param!r}"
        assert code is None or e.code == code, f"code {e.code!r}, want {code!r}"
        return
    raise AssertionError(f"no {kind.__name__}")


names = {m.id for m in client.models.list()}
assert {model, alias} <= names, names

c = client.completions.create(model=model, prompt="Hello", max_tokens=5, temperature=0)
assert c.choices[0].finish_reason in ("length", "stop"), c
assert 1 <= c.usage.completion_tokens <= 5, c.usage
assert c.usage.total_tokens == c.usage.prompt_tokens + c.usage.completion_tokens
assert c.choices[0].text, c

c = client.chat.completions.create(model=alias, messages=[{"role": "user", "content": "Hello"}], max_tokens=5)
assert c.model == model and c.choices[0].message.role == "assistant", c
assert c.object == "chat.completion" and c.usage.prompt_tokens > 0, c

text, usage, finish = "", None, None
for chunk in client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Hello"}],
    max_tokens=8,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
):
    if chunk.usage:
        assert not chunk.choices
        usage = chunk.usage
    for choice in chunk.choices:
        text += choice.delta.content or ""
        finish = choice.finish_reason or finish
assert finish in ("length", "stop") and usage.completion_tokens <= 8, (finish, usage)
whole = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0
)
assert whole.choices[0].message.content == text, (whole.choices[0].message.content, text)

n = sum(
    1
    for chunk in client.completions.create(model=model, prompt="Hello", max_tokens=6, n=2, stream=True)
    for choice in chunk.choices
    if choice.finish_reason
)
assert n == 2, n

raises(openai.NotFoundError, lambda: client.completions.create(model="nope", prompt="x"), "model", "model_not_found")
raises(openai.BadRequestError, lambda: client.completions.create(model=model, prompt="x", max_tokens=0), "max_tokens")
raises(openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=[]), "messages")
raises(openai.NotFoundError, lambda: client.models.retrieve("nope"))
assert client.models.retrieve(model).id == model
print("ok")
