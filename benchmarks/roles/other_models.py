"""Models of other fields: graphs, detection, segmentation, agents, speech; each with the input that its task has."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.roles.compare import Attempt

NODES, EDGES, WIDTH = 12, 40, 32

Made = tuple[nn.Module, Any, Callable[[Any, Any], Any] | None]


def families() -> dict[str, str]:
    """Return {name: the same}: each is a family of its own."""
    return {name: name for name in (*_GRAPHS, *_SEGMENTATION, *_DETECTION, *_AGENTS, *_SPEECH, *_SPEECHBRAIN)}


def attempts(name: str) -> list[Attempt]:
    """Return the way to build and call a model."""
    makers = {
        **dict.fromkeys(_GRAPHS, _graph),
        **dict.fromkeys(_SEGMENTATION, _segmentation),
        **dict.fromkeys(_DETECTION, _detection),
        **dict.fromkeys(_AGENTS, _agent),
        **dict.fromkeys(_SPEECH, _speech),
        **dict.fromkeys(_SPEECHBRAIN, _speechbrain),
    }
    model, example, call = makers[name](name)
    return [Attempt("its task", lambda: model.eval(), lambda _: example, call)]


# ---------- graphs

_GRAPHS: dict[str, Callable[[Any], nn.Module]] = {
    **{
        f"pyg {name}": functools.partial(
            lambda m, name: getattr(m, name)(WIDTH, 48, num_layers=3, out_channels=7), name=name
        )
        for name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")
    },
    "pyg LINKX": lambda m: m.LINKX(NODES, WIDTH, 48, 7, num_layers=2),
    "pyg PMLP": lambda m: m.PMLP(WIDTH, 48, 7, num_layers=3),
    "pyg RECT_L": lambda m: m.RECT_L(WIDTH, 48),
    "pyg AttentiveFP": lambda m: m.AttentiveFP(WIDTH, 48, 7, edge_dim=5, num_layers=2, num_timesteps=2),
    "pyg SGFormer": lambda m: m.SGFormer(WIDTH, 48, 7),
    "pyg Polynormer": lambda m: m.Polynormer(WIDTH, 48, 7),
    "pyg GraphUNet": lambda m: m.GraphUNet(WIDTH, 48, 7, depth=2),
    "pyg LightGCN": lambda m: m.LightGCN(NODES, WIDTH, num_layers=2),
}


def _graph(name: str) -> Made:
    model = _GRAPHS[name](importlib.import_module("torch_geometric.nn.models"))
    nodes, edges = torch.rand(NODES, WIDTH), torch.randint(NODES, (2, EDGES))
    batch = torch.zeros(NODES, dtype=torch.long)
    examples: dict[str, Any] = {
        "pyg LINKX": (nodes, edges),
        "pyg AttentiveFP": (nodes, edges, torch.rand(EDGES, 5), batch),
        "pyg SGFormer": (nodes, edges, batch),
        "pyg Polynormer": (nodes, edges, batch),
        "pyg LightGCN": (edges,),
    }
    return model, examples.get(name, (nodes, edges)), None


# ---------- images

_SEGMENTATION = {
    "torchvision fcn_resnet50": "fcn_resnet50",
    "torchvision deeplabv3_resnet50": "deeplabv3_resnet50",
    "torchvision lraspp_mobilenet_v3_large": "lraspp_mobilenet_v3_large",
}


def _segmentation(name: str) -> Made:
    models = importlib.import_module("torchvision.models.segmentation")
    return getattr(models, _SEGMENTATION[name])(weights=None, weights_backbone=None), torch.rand(1, 3, 64, 64), None


def _two_stages(model: Any, images: Tensor) -> Any:
    """Run the parts of a detector of two stages; which boxes it would take depends on data, the layers do not."""
    features = list(model.backbone(images).values())
    found = [model.rpn.head(features)]
    heads = model.roi_heads
    regions = features[0].new_ones(4, features[0].shape[1], 7, 7)
    found.append(heads.box_predictor(heads.box_head(features[0][..., :7, :7].expand_as(regions))))
    for kind in ("mask", "keypoint"):
        if getattr(heads, f"{kind}_head", None) is not None:
            predictor = getattr(heads, f"{kind}_predictor")
            found.append(predictor(getattr(heads, f"{kind}_head")(features[0][..., :7, :7])))
    return found


def _one_stage(model: Any, images: Tensor) -> Any:
    return model.head(list(model.backbone(images).values()))


_DETECTION: dict[str, Callable[[Any, Any], Any]] = {
    "torchvision fasterrcnn_resnet50_fpn": _two_stages,
    "torchvision maskrcnn_resnet50_fpn": _two_stages,
    "torchvision keypointrcnn_resnet50_fpn": _two_stages,
    "torchvision retinanet_resnet50_fpn": _one_stage,
    "torchvision fcos_resnet50_fpn": _one_stage,
    "torchvision ssd300_vgg16": _one_stage,
    "torchvision ssdlite320_mobilenet_v3_large": _one_stage,
}


def _detection(name: str) -> Made:
    models = importlib.import_module("torchvision.models.detection")
    model = getattr(models, name.split()[1])(weights=None, weights_backbone=None)
    return model, torch.rand(1, 3, 320, 320), _DETECTION[name]


# ---------- agents

_AGENTS = {
    "sb3 ActorCriticPolicy": ("ppo", "MlpPolicy"),
    "sb3 ActorCriticCnnPolicy": ("ppo", "CnnPolicy"),
    "sb3 DQNPolicy": ("dqn", "MlpPolicy"),
    "sb3 SAC actor": ("sac", "actor"),
    "sb3 SAC critic": ("sac", "critic"),
    "sb3 TD3 actor": ("td3", "actor"),
}


def _agent(name: str) -> Made:
    spaces = importlib.import_module("gymnasium.spaces")
    algorithm, part = _AGENTS[name]
    module = importlib.import_module(f"stable_baselines3.{algorithm}.policies")
    is_image = part == "CnnPolicy"
    seen = spaces.Box(0, 255, (3, 64, 64), "uint8") if is_image else spaces.Box(-1, 1, (17,))
    acts = spaces.Discrete(5) if algorithm in ("ppo", "dqn") else spaces.Box(-1, 1, (6,))
    kind = getattr(module, part if part.endswith("Policy") else "MlpPolicy")
    policy = kind(seen, acts, lambda _: 1e-3)
    sight = torch.rand(2, *seen.shape)
    if part == "critic":
        return policy.critic, (sight, torch.rand(2, 6)), None
    if part == "actor":
        # The distribution checks its values, which are not there.
        return (
            policy.actor,
            sight,
            lambda model, given: model.get_action_dist_params(given)[:2] if algorithm == "sac" else model(given),
        )
    if algorithm == "ppo":
        return policy, sight, _both
    return policy, sight, lambda model, given: model.q_net(given)


def _both(model: Any, sight: Tensor) -> Any:
    features = model.extract_features(sight)
    actor, critic = model.mlp_extractor(features)
    return model.action_net(actor), model.value_net(critic)


# ---------- speech

_SPEECH: dict[str, Callable[[Any], tuple[nn.Module, Any]]] = {
    "torchaudio Conformer": lambda m: (m.Conformer(80, 4, 128, 2, 31), (torch.rand(2, 40, 80), torch.tensor([40, 30]))),
    "torchaudio ConvTasNet": lambda m: (m.ConvTasNet(), torch.rand(1, 1, 4000)),
    "torchaudio DeepSpeech": lambda m: (m.DeepSpeech(40, n_hidden=128), torch.rand(1, 1, 20, 40)),
    "torchaudio Emformer": lambda m: (
        m.Emformer(64, 4, 128, 2, 4, right_context_length=1),
        (torch.rand(2, 9, 64), torch.tensor([8, 8])),
    ),
    "torchaudio HDemucs": lambda m: (m.hdemucs_low(["drums", "bass"]), torch.rand(1, 2, 44100)),
    "torchaudio RNNT": lambda m: (
        m.emformer_rnnt_base(30),
        (
            torch.rand(1, 36, 80),
            torch.tensor([32]),
            torch.ones(1, 8, dtype=torch.int32),
            torch.tensor([8], dtype=torch.int32),
        ),
    ),
    "torchaudio SquimObjective": lambda m: (m.squim_objective_base(), torch.rand(1, 16000)),
    "torchaudio Tacotron2": lambda m: (
        m.Tacotron2(),
        (torch.ones(1, 9, dtype=torch.long), torch.tensor([9]), torch.rand(1, 80, 12), torch.tensor([12])),
    ),
    "torchaudio Wav2Letter": lambda m: (m.Wav2Letter(), torch.rand(1, 1, 4000)),
    "torchaudio wav2vec2": lambda m: (
        m.wav2vec2_model("group_norm", None, False, 128, 0.0, 16, 4, 2, 4, 0.0, 256, 0.0, 0.0, False, 0.0, 29),
        torch.rand(1, 8000),
    ),
    "torchaudio wavlm_base": lambda m: (m.wavlm_base(aux_num_out=29), torch.rand(1, 8000)),
    "torchaudio WaveRNN": lambda m: (
        m.WaveRNN([5, 5, 8], 512, 200),
        (torch.rand(1, 1, 2000), torch.rand(1, 1, 128, 14)),
    ),
}


def _speech(name: str) -> Made:
    model, example = _SPEECH[name](importlib.import_module("torchaudio.models"))
    return model, example, None


_SPEECHBRAIN: dict[str, tuple[str, Callable[[Any], tuple[nn.Module, Any]]]] = {
    "speechbrain ECAPA_TDNN": (
        "ECAPA_TDNN",
        lambda m: (m.ECAPA_TDNN(80, lin_neurons=64, channels=[64] * 4 + [192]), torch.rand(2, 50, 80)),
    ),
    "speechbrain Xvector": ("Xvector", lambda m: (m.Xvector(in_channels=40), torch.rand(2, 50, 40))),
    "speechbrain CRDNN": (
        "CRDNN",
        lambda m: (m.CRDNN(input_shape=[2, 40, 40], rnn_neurons=64, dnn_neurons=64), torch.rand(2, 40, 40)),
    ),
    "speechbrain ContextNet": ("ContextNet", lambda m: (m.ContextNet(input_shape=(2, 48, 40)), torch.rand(2, 48, 40))),
    "speechbrain TransformerASR": (
        "transformer.TransformerASR",
        lambda m: (
            m.TransformerASR(
                tgt_vocab=50, input_size=40, d_model=64, nhead=4, num_encoder_layers=2, num_decoder_layers=2, d_ffn=128
            ),
            (torch.rand(2, 20, 40), torch.ones(2, 6, dtype=torch.long)),
        ),
    ),
    "speechbrain ConformerEncoder": (
        "transformer.Conformer",
        lambda m: (m.ConformerEncoder(2, 64, 128, 4, attention_type="regularMHA"), torch.rand(2, 20, 64)),
    ),
}


def _speechbrain(name: str) -> Made:
    module, make = _SPEECHBRAIN[name]
    model, example = make(importlib.import_module(f"speechbrain.lobes.models.{module}"))
    return model, example, None
