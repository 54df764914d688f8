"""Models of the Hub, asked for over HTTP with the real client: what is fetched, what is refused, and how."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import LLAMA, mionnx, succeeded
from gguf_files import write_small
from hub_server import HubServer, commit, serving
from repository import REPOSITORY, SHARED

from mionnx import ExportError, InputError, MIModel, ModelError
from mionnx.machine.progress import silent
from mionnx.run.find_model import adopt, checkpoint_folder, hub_folder
from mionnx.run.repository import Version

FOREIGN = REPOSITORY / "tests" / "shared" / "foreign"
NAME = "somebody/llama"
SIDES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
MADE = {  # a repository -> what is fetched of its files beside its config and tokenizer
    ("model.safetensors", "consolidated.safetensors", "original/consolidated.00.pth", "original/params.json"): (
        "model.safetensors",
    ),
    ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack"): ("pytorch_model.bin",),
    ("model.safetensors", "pytorch_model.bin"): ("model.safetensors",),
    ("model.safetensors", "onnx/model.onnx", "openvino/openvino_model.bin"): ("model.safetensors",),
    ("model.safetensors", "model.fp16.safetensors", "optimizer.pt", "notes/a.json", "preprocessor_config.json"): (
        "model.safetensors",
        "preprocessor_config.json",
    ),
    ("model.safetensors", "chat_template.jinja", "additional_chat_templates/rag.jinja", "examples/rag.jinja"): (
        "additional_chat_templates/rag.jinja",
        "chat_template.jinja",
        "model.safetensors",
    ),
    ("world.pth", "rwkv_vocab_v20230424.txt"): ("rwkv_vocab_v20230424.txt", "world.pth"),
}


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[HubServer]:
    """A Hub without repositories, and a cache without files."""
    with serving(tmp_path / "repositories") as made:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", made.url)
        template = f"{made.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield made


def write(hub: HubServer, files: dict[str, bytes] | tuple[str, ...], name: str = NAME) -> Path:
    """A repository with a config, a tokenizer, and some files."""
    folder = hub.root / name
    folder.mkdir(parents=True, exist_ok=True)
    for one in SIDES:
        shutil.copyfile(LLAMA / one, folder / one)
    for one in files:
        (folder / one).parent.mkdir(parents=True, exist_ok=True)
        (folder / one).write_bytes(files[one] if isinstance(files, dict) else one.encode())
    return folder


def write_shards(hub: HubServer, stem: str, count: int = 3) -> list[str]:
    """Shards of a checkpoint, and their index."""
    base, _, ending = stem.partition(".")
    shards = [f"{base}-{n:05d}-of-{count:05d}.{ending}" for n in range(1, count + 1)]
    index = json.dumps({"metadata": {}, "weight_map": {f"layer.{n}": shard for n, shard in enumerate(shards)}}).encode()
    write(hub, {**{shard: shard.encode() for shard in shards}, f"{stem}.index.json": index})
    return [*shards, f"{stem}.index.json"]


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


class TestWhatIsFetched:
    """Finding 19 of issue 32: the files that transformers would load, and no other."""

    @pytest.mark.parametrize("files", MADE, ids=lambda files: files[0] + "+" + files[-1])
    def test_of_a_repository(self, hub, files):
        write(hub, files)
        found = hub_folder(NAME, None)
        assert hub.fetched() == sorted([*SIDES, *MADE[files]])
        assert (found if found.is_file() else found / MADE[files][-1]).is_file()

    @pytest.mark.parametrize("stem", ["model.safetensors", "pytorch_model.bin"])
    def test_the_shards_of_the_index_that_is_read(self, hub, stem):
        files = write_shards(hub, stem)
        write(hub, ("consolidated.safetensors", "pytorch_model.bin.index.json.old", "model-00001-of-00009.safetensors"))
        hub_folder(NAME, None)
        assert hub.fetched() == sorted([*SIDES, *files])

    def test_the_single_file_goes_before_shards(self, hub):
        write_shards(hub, "model.safetensors")
        write(hub, ("model.safetensors",))
        hub_folder(NAME, None)
        assert hub.fetched() == sorted([*SIDES, "model.safetensors"])

    def test_the_modules_of_sentence_transformers(self, hub):
        modules = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "gone"}]
        files = ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "model.safetensors")
        extra = ("2_Dense/pytorch_model.bin", "3_Other/config.json", "onnx/model.onnx", "eval/results.txt")
        write(hub, (*files, *extra))
        write(hub, {"modules.json": json.dumps(modules).encode()})
        hub_folder(NAME, None)
        assert hub.fetched() == sorted([*SIDES, *files, "modules.json"])

    def test_a_subfolder_and_a_revision(self, hub):
        other = write(hub, ("model.safetensors", "sub/config.json", "sub/model.safetensors"), f"{NAME}@v1")
        write(hub, ("model.safetensors",))
        folder = hub_folder(NAME, None, Version("v1", "sub"))
        assert folder == next(folder.parents[1].glob("*")) / "sub"
        assert folder.parent.name == commit(other)
        assert hub.fetched() == ["sub/config.json", "sub/model.safetensors"]
        assert hub_folder(NAME, None, Version(commit(other), "sub")) == folder  # a commit is a revision too
        with pytest.raises(ModelError, match=r"somebody/llama \(revision v1\) has no files in a folder 'sup'; .*'sub'"):
            hub_folder(NAME, None, Version("v1", "sup"))
        with pytest.raises(ModelError, match=r"^somebody/llama has no revision 'v2' on the Hugging Face Hub$"):
            hub_folder(NAME, None, Version("v2"))

    def test_no_weights_for_a_graph_alone(self, hub):
        write(hub, ("model.safetensors",))
        checkpoint_folder(NAME, weights=False)
        assert hub.fetched() == sorted(SIDES)

    def test_a_name_with_brackets_is_no_pattern(self, hub):
        write(hub, ("model.safetensors", "a[1].txt", "a1.jsonl"))
        hub_folder(NAME, None)
        assert hub.fetched() == sorted([*SIDES, "a[1].txt", "model.safetensors"])

    def test_what_is_there_is_not_fetched_again(self, hub):
        write(hub, ("model.safetensors",))
        folder = hub_folder(NAME, None)
        hub.asked.clear()
        assert hub_folder(NAME, None) == folder
        assert hub.fetched() == []


@pytest.mark.slow
@pytest.mark.parametrize("single", [False, True])
def test_transformers_asks_for_the_same_weights(hub, single, tmp_path):
    """The oracle of what is read: its own choice among the files of a repository."""
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    files = write_shards(hub, "model.safetensors", 2)
    write(hub, ("consolidated.safetensors", "pytorch_model.bin", *(["model.safetensors"] if single else [])))
    hub_folder(NAME, None)
    ours = {name for name in hub.fetched() if name.endswith((".safetensors", ".bin"))}
    options = {"cache_dir": str(tmp_path / "other"), "revision": "main"}
    found, _ = _get_resolved_checkpoint_files(NAME, None, None, None, {"file_type": "model"}, False, None, options)
    assert ours == {Path(path).name for path in found} <= {*files, "model.safetensors"}


class TestAHookedModel:
    def test_opens_and_needs_its_own_weights_alone(self, hub):
        write(hub, ("consolidated.safetensors", "pytorch_model.bin"))
        for name in ("model.onnx", "model.safetensors"):
            shutil.copyfile(LLAMA / name, hub.root / NAME / name)
        model = MIModel.from_pretrained(NAME, threads=1)
        assert hub.fetched() == sorted([*SIDES, "model.onnx", "model.safetensors"])
        expected = MIModel.from_pretrained(LLAMA, threads=1).forward([5, 6]).output()
        assert np.array_equal(model.forward([5, 6]).output(), expected)

    def test_the_command_line_takes_the_same(self, hub):
        for name in ("sub/config.json", "sub/tokenizer.json", "sub/model.onnx", "sub/model.safetensors"):
            (hub.root / f"{NAME}@v1" / "sub").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(LLAMA / Path(name).name, hub.root / f"{NAME}@v1" / name)
        write(hub, ())
        told = succeeded("run", NAME, "The capital of France is", "--revision", "v1", "--subfolder", "sub", "--k", 1)
        assert "Paris" in told


class TestWithoutTheHub:
    def test_the_cache_serves(self, hub, monkeypatch):
        write_shards(hub, "model.safetensors")
        write(hub, ("consolidated.safetensors", "sub/model.safetensors"))
        folder = hub_folder(NAME, None)
        hub.asked.clear()
        offline(monkeypatch)
        assert hub_folder(NAME, None) == folder
        assert hub.asked == []
        with pytest.raises(
            ModelError, match=r"neither a folder here nor in the cache.*out of reach \(HF_HUB_OFFLINE is set\)"
        ):
            hub_folder("somebody/other", None)

    def test_nor_does_a_server_that_is_down_matter(self, hub, monkeypatch):
        write(hub, ("model.safetensors",))
        folder = hub_folder(NAME, None)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        assert hub_folder(NAME, None) == folder

    def test_a_cache_without_the_weights_is_said(self, hub, monkeypatch):
        write(hub, ("model.safetensors",))
        checkpoint_folder(NAME, weights=False)
        offline(monkeypatch)
        with pytest.raises(ModelError, match=r"in the Hub's cache .*HF_HUB_OFFLINE is set\) holds no weights"):
            hub_folder(NAME, None)


class TestOneSentence:
    def test_a_missing_repository(self, hub):
        write(hub, ())
        for given in (None, "hf_token"):
            with pytest.raises(ModelError) as refused:
                MIModel.from_pretrained("somebody/lama", token=given)
            told = str(refused.value)
            assert told.startswith("'somebody/lama' is neither a folder here nor a model of the Hugging Face Hub")
            assert "local_files_only" not in told
            assert "\n" not in told

    @pytest.mark.parametrize("token", [None, "wrong"])
    def test_a_gated_repository(self, hub, token):
        write(hub, ("model.safetensors",))
        hub.gated[NAME] = "right"
        with pytest.raises(
            ModelError, match=rf"^{NAME} is gated: accept its terms at {hub.url}/{NAME}, and give token="
        ):
            MIModel.from_pretrained(NAME, token=token)
        hub_folder(NAME, None, Version(token="right"))
        assert "right" in hub.tokens

    def test_the_environments_token_is_used(self, hub, monkeypatch):
        write(hub, ("model.safetensors",))
        hub.gated[NAME] = "right"
        monkeypatch.setenv("HF_TOKEN", "right")
        hub_folder(NAME, None)
        assert hub.fetched() == sorted([*SIDES, "model.safetensors"])

    def test_a_repository_without_weights(self, hub):
        write(hub, ("tf_model.h5", "consolidated.safetensors"))
        with pytest.raises(ModelError, match=r"somebody/llama holds no weights that are read .*; it has consolidated"):
            MIModel.from_pretrained(NAME)
        assert hub.fetched() == []

    def test_a_damaged_index(self, hub):
        write(hub, {"model.safetensors.index.json": b'{"weight_map": [1]}'})
        with pytest.raises(ModelError, match=r"index\.json is damaged"):
            hub_folder(NAME, None)

    def test_a_token_is_in_no_error_and_no_repr(self):
        assert "secret" not in repr(Version(token="secret"))

    def test_a_revision_of_what_lies_here(self):
        with pytest.raises(InputError, match=r"revision='v1', but .*world-llama lies here"):
            MIModel.from_pretrained(LLAMA, revision="v1")

    def test_a_folder_of_what_lies_here(self):
        model = MIModel.from_pretrained(LLAMA.parent, subfolder=LLAMA.name)
        assert model.hooked.folder == LLAMA
        with pytest.raises(ModelError, match=r"has no folder 'world-lama'; did you mean 'world-llama'"):
            MIModel.from_pretrained(LLAMA.parent, subfolder="world-lama")


class TestTheBytes:
    def test_are_on_the_progress_bar(self, hub):
        write(hub, {"model.safetensors": bytes(300_000)})
        told: list[tuple[str, int, int]] = []
        hub_folder(NAME, None, progress=lambda *one: told.append(one))
        shown = [one for one in told if one[2] == 300_000]
        assert shown[-1] == (f"downloading {NAME}, 293.0 KiB", 300_000, 300_000)
        told.clear()
        hub_folder(NAME, None, progress=lambda *one: told.append(one))
        assert told == []

    @pytest.mark.filterwarnings("ignore")
    def test_a_broken_connection_is_resumed(self, hub, monkeypatch):
        monkeypatch.setattr("time.sleep", lambda _: None)
        data = np.random.default_rng(0).bytes(300_000)
        write(hub, {"model.safetensors": data})
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
        hub.breaks["model.safetensors"] = [100_000, 50_000]
        folder = hub_folder(NAME, None)
        assert (folder / "model.safetensors").read_bytes() == data
        begun = [first for method, path, first in hub.asked if (method, path) == ("GET", "model.safetensors")]
        assert begun[0] == 0
        assert 0 < begun[1] < begun[2] <= 150_000

    @pytest.mark.filterwarnings("ignore")
    def test_one_that_stays_broken_is_said_and_what_is_whole_is_kept(self, hub, monkeypatch):
        monkeypatch.setattr("time.sleep", lambda _: None)
        write_shards(hub, "model.safetensors")
        last = "model-00003-of-00003.safetensors"
        hub.breaks[last] = [0] * 6
        with pytest.raises(ModelError, match=rf"^the download of {NAME} broke off \(.*called again, it goes on"):
            hub_folder(NAME, None)
        hub.asked.clear()
        hub_folder(NAME, None)
        assert last in hub.fetched()
        assert "config.json" not in hub.fetched()


class TestOnnxFiles:
    """Three ONNX files, one with its weights beside it, in the layout of transformers.js."""

    FILES = ("model.onnx", "model_q4.onnx", "model_fp16.onnx")

    @pytest.fixture(autouse=True)
    def repository(self, hub) -> Path:
        folder = hub.root / NAME
        (folder / "onnx").mkdir(parents=True)
        source = next(path.parent for path in sorted(FOREIGN.rglob("*.onnx")) if "optimum" in str(path))
        proto = onnx.load(next(source.glob("*.onnx")))
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        for name in self.FILES:
            data = {"save_as_external_data": True, "location": f"{name}_data", "size_threshold": 2000}
            onnx.save(proto, folder / "onnx" / name, **(data if "q4" in name else {}))
        return folder

    def fetched(self, hub: HubServer) -> list[str]:
        return [name for name in hub.fetched() if "onnx/" in name]

    def test_one_is_downloaded_and_the_choice_is_said(self, hub):
        with pytest.warns(UserWarning, match=r"holds 3 ONNX files, and onnx/model.onnx is taken.*model_q4.onnx"):
            model = MIModel.from_pretrained(NAME)
        assert model.num_layers
        assert self.fetched(hub) == ["onnx/model.onnx"]

    def test_the_named_one_is_downloaded_with_its_weights(self, hub, tmp_path):
        said = succeeded("adopt", NAME, "--file", "model_q4.onnx", "-o", str(tmp_path / "out"))
        assert "model_q4.onnx" in said
        assert self.fetched(hub) == ["onnx/model_q4.onnx", "onnx/model_q4.onnx_data"]
        assert MIModel.from_pretrained(tmp_path / "out").forward(np.array([[1, 2, 3]])).output().shape[1] == 3

    def test_one_that_the_repository_lacks_is_refused_before_a_download(self, hub, tmp_path):
        with pytest.raises(
            ExportError, match=r"somebody/llama has no ONNX file 'model_q8.onnx'; it has .*model_q4.onnx"
        ):
            adopt(Path(NAME), tmp_path / "out", "model_q8.onnx", silent)
        assert self.fetched(hub) == []

    @pytest.mark.parametrize("copies", [False, True])
    @pytest.mark.slow_beyond(1)
    def test_linked_weights_are_said_and_copied_on_request(self, repository, tmp_path, copies):
        source, target = repository / "onnx" / "model_q4.onnx", tmp_path / "out"
        said = succeeded("adopt", str(source), "-o", str(target), *(["--copy"] if copies else []))
        assert ("--copy" in said) == (not copies)
        data = (target / "model_q4.onnx_data", source.with_name("model_q4.onnx_data"))
        assert {path.stat().st_nlink for path in data} == {1 if copies else 2}
        if copies:
            onnx.load(source)
            onnx.load(target / "model.onnx")
        else:
            with pytest.raises(onnx.checker.ValidationError, match="hard links"):
                onnx.load(source)

    def test_without_a_network_the_cache_serves(self, hub, monkeypatch):
        with pytest.warns(UserWarning, match="is taken"):
            MIModel.from_pretrained(NAME)
        offline(monkeypatch)
        assert MIModel.from_pretrained(NAME).num_layers


class TestSingleFiles:
    """GGUF files, each a model; their architecture is none, so that none is exported."""

    @pytest.fixture
    def gguf(self, tmp_path) -> bytes:
        path = tmp_path / "some.gguf"
        write_small(path, {"general.architecture": "bert"}, {"a": np.zeros(1, np.float32)})
        return path.read_bytes()

    def test_one_is_named_behind_the_repository(self, hub, gguf):
        write(hub, {"model.Q4_K_M.gguf": gguf, "model.Q8_0.gguf": gguf})
        with pytest.raises(ExportError, match="architecture 'bert'"):
            MIModel.from_pretrained(f"{NAME}/model.Q4_K_M.gguf")
        assert hub.fetched() == ["model.Q4_K_M.gguf"]
        with pytest.raises(
            ModelError, match=r"has no file 'model.Q4_K.gguf'; it has .*; did you mean 'model.Q4_K_M.gguf'"
        ):
            MIModel.from_pretrained(f"{NAME}/model.Q4_K.gguf")

    def test_the_only_one_is_taken_and_of_several_none(self, hub, gguf):
        folder = write(hub, {"b.gguf": gguf})
        with pytest.raises(ExportError, match="architecture 'bert'"):
            MIModel.from_pretrained(NAME)
        (folder / "c.gguf").write_bytes(gguf)
        with pytest.raises(ModelError, match=rf"holds 2 GGUF files: give one of them, as {NAME}/b\.gguf"):
            MIModel.from_pretrained(NAME)

    def test_a_pth_file_of_several_brings_its_vocabulary(self, hub):
        write(hub, ("a.pth", "a_cfg.pkl", "b.pth", "b_cfg.pkl", "rwkv_vocab_v1.txt"))
        with pytest.raises(ModelError, match="holds 2 model files: give one of them"):
            hub_folder(NAME, None)
        assert hub_folder(f"{NAME}/b.pth", None).name == "b.pth"
        assert "a.pth" not in hub.fetched()
        assert {"rwkv_vocab_v1.txt", "b_cfg.pkl"} <= {*hub.fetched()}
        assert "a_cfg.pkl" not in hub.fetched()


@pytest.mark.slow
def test_a_model_of_transformer_lens_comes_with_its_config_alone(hub):
    """As neelnanda.io's lie there: weights of torch, checkpoints of the training in a folder, a config of its own."""
    made = SHARED / "hooked_transformers" / "attention-only"
    checkpoint = (made / "model_final.pth").read_bytes()
    write(hub, {"model_final.pth": checkpoint, "checkpoints/model_100.pth": checkpoint})
    for side in SIDES:
        (hub.root / NAME / side).unlink()
    shutil.copyfile(made / "config.json", hub.root / NAME / "config.json")
    model = MIModel.from_pretrained(NAME, threads=1)
    assert model.hooked.metadata.family == "hooked_transformer"
    assert {*hub.fetched()} == {"config.json", "model_final.pth"}
    expected = np.load(made / "expected.npz")["logits"]
    np.testing.assert_allclose(model.forward(np.array([[1, 2, 3, 4, 5]])).output(), expected[:1], atol=1e-5)


class TestAMistypedPath:
    """Part 3, the command line: what is mistyped is said before the Hub is asked."""

    @pytest.mark.parametrize("name", ["models/world-lama", "models/wrold-llama", "world-lama"])
    def test_is_called_so_before_the_hub_is_asked(self, monkeypatch, name):
        monkeypatch.setattr("mionnx.run.repository.Repository._list", lambda _: pytest.fail("the Hub was asked"))
        ran = mionnx("hooks", name)
        assert ran.returncode == 1
        told = " ".join(ran.stderr.split())
        assert f"{name} is no folder with a model: nothing is there; did you mean '" in told
        assert "local_files_only" not in told

    def test_a_model_of_another_size_is_asked_for(self, hub, tmp_path, monkeypatch):
        write(hub, ("model.safetensors",), "some/Llama-3.2-1B")
        monkeypatch.chdir(tmp_path)
        for other in ("Llama-3.2-3B", "Llama-3.2-1B-Instruct"):
            (tmp_path / "some" / other).mkdir(parents=True)
        hub_folder("some/Llama-3.2-1B", None)
        (tmp_path / "some" / "Llama-3.2-1C").mkdir()
        with pytest.raises(ModelError, match=r"did you mean 'some/Llama-3.2-1C'.*revision='main'"):
            hub_folder("some/Llama-3.2-1B", None)
        hub_folder("some/Llama-3.2-1B", None, Version("main"))
