"""API keys: who is let in, and a table that is not as it should be."""

import pytest

from minimodel.serve.errors import ApiError
from minimodel.serve.tenants import Tenant, Tenants, read_tenants

TABLE = """# key   tenant   retention
sk-1    ann
sk-2    ann         # another key of hers
sk-3    robot    agent
"""


@pytest.fixture
def read(tmp_path):
    def read(text):
        (tmp_path / "keys").write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_tenants(tmp_path / "keys")
    return read


def test_a_key_is_a_tenant(read):
    tenants = read(TABLE)
    assert tenants.of("Bearer sk-1") == tenants.of("bearer sk-2") == Tenant("ann", "chat")
    assert tenants.of("Bearer  sk-3") == Tenant("robot", "agent")
    assert tenants.of("Bearer sk-1").salt != tenants.of("Bearer sk-3").salt


@pytest.mark.parametrize(("header", "message"), [
    (None, "there is no API key"), ("", "there is no API key"),
    ("Bearer sk-9", "this API key is unknown"), ("sk-1", "this API key is unknown"),
    ("Basic sk-1", "this API key is unknown"), ("Bearer", "this API key is unknown"),
    ("Bearer sk-1 sk-1", "this API key is unknown"), ("Bearer ann", "this API key is unknown")])
def test_who_has_no_key_is_not_let_in(read, header, message):
    with pytest.raises(ApiError, match=f"^{message}: send a header 'Authorization: ") as refused:
        read(TABLE).of(header)
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("header", [None, "Bearer anything"])
def test_without_a_table_all_are_one_tenant(header):
    assert Tenants().of(header) == Tenant("", "chat")


@pytest.mark.parametrize(("text", "message"), [
    ("", "holds no API key: write a line 'KEY TENANT' for each"),
    ("# sk-1 ann\n\n", "holds no API key"),
    ("sk-1 ann\nsk-2\n", "line 2 of .*keys: 1 words, and a line is KEY TENANT or KEY TENANT RET"),
    ("sk-1 ann chat for ever", "line 1 of .*: 5 words"),
    ("sk-1 ann\n\nsk-1 ben", "line 3 of .*: this key stands here already"),
    ("sk-1 ann week", "line 1 of .*: retention='week' is none of agent, chat"),
    (b"sk-1 \xff\n", "cannot read the API keys in .*keys: .* Give a text file")])
def test_a_table_that_cannot_be_used(read, text, message):
    with pytest.raises(ValueError, match=message) as refused:
        read(text)
    assert "sk-1" not in str(refused.value)


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the API keys in .*nothing"):
        read_tenants(tmp_path / "nothing")
