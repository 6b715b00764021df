"""Templates of checkpoints run in a sandbox, and errors in them are named."""

import json

import pytest
from processor.messages import image_part, user, with_template

from saccade.errors import CheckpointError, RequestError, UserError
from saccade.processor.chat_template import ChatTemplate, read_template


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch hacked') }}",
        "{{ lipsum.__globals__['os'].getcwd() }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append('x') }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].pop('content') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{{ messages[0].nothing.more }}",
        "{{ raise_exception('only one turn') }}",
    ],
)
def test_a_template_that_reaches_out_or_changes_messages_is_an_error(processor, tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    messages = [user("hi")]
    with pytest.raises(UserError, match="chat template"):
        with_template(processor, source).preprocess(messages, add_generation_prompt=True)
    assert messages == [user("hi")]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}", "{{ range(10 ** 9) }}", "{{ messages[0].content.index('z') }}", "{{ 'a' ~ ('b' + 1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)  # fmt: skip
def test_a_template_that_breaks_is_an_error_that_says_so(processor, source):
    with pytest.raises(UserError, match="chat template"):
        with_template(processor, source).preprocess([user("hi")], add_generation_prompt=True)


def test_a_template_that_raises_gives_its_words(processor):
    strict = with_template(processor, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="the chat template refuses this conversation: roles must alternate"):
        strict.preprocess([user("hi")])


def test_a_template_that_does_not_parse_is_the_checkpoints_fault():
    with pytest.raises(CheckpointError, match="chat template does not parse"):
        ChatTemplate("{% if %}")


def test_a_template_for_text_alone_refuses_images_with_advice(processor):
    with pytest.raises(RequestError, match="A template for text alone takes no images"):
        with_template(processor, "{{ '<|im_start|>' + messages[0].content }}").preprocess([user([image_part()])])


def test_an_image_that_the_template_ignores_is_refused(processor):
    blind = with_template(processor, "<|im_start|>user\n{{ messages[0].role }}<|im_end|>")
    with pytest.raises(RequestError, match="1 images or videos but 0 placeholders: an image without a placeholder"):
        blind.preprocess([user([image_part()])])


def test_a_placeholder_without_an_image_is_refused(processor):
    seeing = with_template(processor, "<|vision_start|><|image_pad|><|vision_end|>")
    with pytest.raises(
        RequestError, match="1 image placeholders but 0 images or videos: a placeholder without an image"
    ):
        seeing.preprocess([user("look")])


def test_placeholders_of_the_wrong_kind_are_refused(processor):
    confused = with_template(processor, "<|video_pad|>")
    with pytest.raises(RequestError, match=r"placeholders for \['video'\] where the conversation has \['image'\]"):
        confused.preprocess([user([image_part()])])


def test_templates_know_the_checkpoints_tokens_and_json(checkpoint, tmp_path):
    template = (
        "{{ bos_token }}|{{ eos_token }}|{{ messages[0] | tojson }}|{% for m in messages %}{% break %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = ChatTemplate.load(tmp_path)
    assert loaded.render([user("é")], add_generation_prompt=False) == '<s>|</s>|{"role": "user", "content": "é"}|'


def test_older_files_of_the_template_are_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"no chat_template.jinja. Copy it from the original model"):
        read_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    assert read_template(tmp_path) == "old"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "newer"}')
    assert read_template(tmp_path) == "newer"
    (tmp_path / "chat_template.jinja").write_text("newest")
    assert read_template(tmp_path) == "newest"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"chat_template\.json: .*JSON"):
        read_template(tmp_path)
