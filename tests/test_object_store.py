"""A data set on S3, read over HTTP by zarr's own store: README's example, run as it stands.

The server is moto's, in a thread of this process, on the loopback address.
"""

import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from moto.server import ThreadedMotoServer
from test_shards import DOCUMENTS, make_dataset, use_small_files, write_shard

from dflash_offline.shard_set import ShardSet

README = Path(__file__).parent.parent / "README.md"
BUCKET, PREFIX, SHARD = "my-bucket", "shards/train", "shards/shard-000000"  # as in the example
PLANES = {
    "raw": ["bits"],
    "lossless": ["exponents", "signs_mantissas"],
    "int8": ["codes", "scales"],
}
# Nothing of a user's own settings may count: no credentials, no profile, no proxy.
SETTINGS = {
    "AWS_ALLOW_HTTP": "true",
    "AWS_ACCESS_KEY_ID": "dummy",
    "AWS_SECRET_ACCESS_KEY": "dummy",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
UNSET = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3")


@dataclass(frozen=True)
class Copy:
    """A data set here, and the S3 client of the server that has the same."""

    local: Path
    planes: list[str]
    client: Any

    @contextmanager
    def damaged(self, plane, damage):
        """For a while, the plane's object of tokens 192 to 255 is what `damage` makes of it."""
        place = {"Bucket": BUCKET, "Key": f"{PREFIX}/{SHARD}/{plane}/c/3/0/0"}
        whole = self.client.get_object(**place)["Body"].read()
        damage(place, bytearray(whole))
        try:
            yield
        finally:
            self.client.put_object(**place, Body=whole)


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def client(patch):
    """An S3 client, and the settings by which others find the same server."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": address}.items():
        patch.setenv(name, value)
    for name in UNSET:
        patch.delenv(name, raising=False)
    client = boto3.client("s3")
    yield client
    client.close()
    server.stop()


@pytest.fixture(scope="module", params=PLANES)
def copy(request, tmp_path_factory, client, patch):
    """Each codec's data set of several objects a plane, all its files uploaded."""
    use_small_files(patch)
    data = make_dataset(tmp_path_factory.mktemp(request.param), request.param)
    write_shard(data, "shard-000000", DOCUMENTS)
    keys = {f"{PREFIX}/{p.relative_to(data.path)}": p for p in data.path.rglob("*") if p.is_file()}
    client.create_bucket(Bucket=BUCKET)
    for key, path in keys.items():
        client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
    yield Copy(data.path, PLANES[request.param], client)
    for key in keys:
        client.delete_object(Bucket=BUCKET, Key=key)
    client.delete_bucket(Bucket=BUCKET)


def run_example():
    """The names that README's example leaves behind."""
    section = README.read_text().split("# Reading from an object store\n")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    names = {}
    exec(code, names)
    return names


def bits(taps):
    assert taps.dtype == torch.bfloat16
    return taps.view(torch.int16)


def test_readme_reads_a_document_as_the_local_reader_does(copy):
    local, found = ShardSet([copy.local]), run_example()
    ids, mask = local.tokens(3)
    assert len(ids) == 300
    assert torch.equal(found["input_ids"], ids)
    assert torch.equal(found["loss_mask"], mask)
    assert torch.equal(bits(found["taps"]), bits(local.taps(3)))


def test_whole_remote_shard_equals_the_local_one_bit_for_bit(copy):
    local, found = ShardSet([copy.local]), run_example()
    shard, codec = found["shard"], found["codec"]
    every = range(len(DOCUMENTS))
    assert shard["offsets"][:].tolist() == [0, 5, 136, 137, 437, 501]
    ids, masks = zip(*(local.tokens(i) for i in every), strict=True)
    assert torch.equal(torch.from_numpy(shard["input_ids"][:]), torch.cat(ids))
    assert torch.equal(torch.from_numpy(shard["loss_mask"][:]).bool(), torch.cat(masks))
    taps = codec.decode({plane: torch.from_numpy(shard[plane][:]) for plane in codec.arrays()})
    assert torch.equal(bits(taps), bits(torch.cat([local.taps(i) for i in every])))


@pytest.mark.parametrize("byte", [50, -50], ids=["chunk", "index"])
def test_flipped_bit_in_an_object_is_found_by_its_crc32c(copy, byte):
    def flip(place, content):
        content[byte] ^= 4
        copy.client.put_object(**place, Body=bytes(content))

    for plane in copy.planes:
        with copy.damaged(plane, flip), pytest.raises(ValueError, match="checksum"):
            run_example()  # document 3: tokens 137 to 436


def test_lost_or_short_object_is_not_read_as_fill(copy):
    def lose(place, content):
        copy.client.delete_object(**place)

    def cut(place, content):
        copy.client.put_object(**place, Body=bytes(content[:-1]))

    for plane in copy.planes:
        for damage in (lose, cut):
            message = f"{SHARD}/{plane}/c/3/0/0 is missing or cut short"
            with copy.damaged(plane, damage), pytest.raises(ValueError, match=message):
                run_example()
