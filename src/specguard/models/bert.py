"""Encoders of text as networks that take word embeddings: BERT and its relatives in transformers.

Their blocks normalize after the skip connection: norm(x + attention(x)), then norm(x + mlp(x)). The first layer
adds positions and the first token type, so the input is the word embeddings of a sentence, tokens x dim.
"""

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from specguard.errors import ConfigError
from specguard.models.embedding import positions
from specguard.models.equality import Pair, View
from specguard.models.layers import (
    Part,
    activation,
    attention,
    classifier,
    feed_forward,
    linear,
    norm,
    stacked,
)
from specguard.nn import Block, ClassPool, Residual

_BERT = "transformers.models.bert.modeling_bert.Bert"
_ROBERTA = "transformers.models.roberta.modeling_roberta.Roberta"
_DISTIL = "transformers.models.distilbert.modeling_distilbert."
_BODIES = {
    f"{_BERT}ForSequenceClassification": "bert",
    f"{_ROBERTA}ForSequenceClassification": "roberta",
    f"{_DISTIL}DistilBertForSequenceClassification": "distilbert",
}
TEXT_KINDS = tuple(_BODIES)
ATTENTIONS = (f"{_BERT}Attention", f"{_ROBERTA}Attention")  # including the output map
SELF_ATTENTIONS = (
    f"{_BERT}SelfAttention",
    f"{_BERT}SdpaSelfAttention",
    f"{_ROBERTA}SelfAttention",
    f"{_ROBERTA}SdpaSelfAttention",
)
DISTILLED_ATTENTIONS = tuple(
    f"{_DISTIL}{name}" for name in ("DistilBertSelfAttention", "MultiHeadSelfAttention", "DistilBertSdpaAttention")
)


def text_layers(part: Part, tokens: int) -> "tuple[tuple[int, ...], OrderedDict[str, nn.Module]]":
    """The input shape and the layers of a text classifier, for sentences of this many tokens."""
    config = part.module.config
    if getattr(config, "is_decoder", False):
        raise part.refused("set up as a decoder, whose attention is causal")
    body = part.child(_BODIES[part.kind])
    part.only(body.path, "pre_classifier", "classifier")
    body.only("embeddings", "encoder", "transformer", "pooler")
    table, embeddings = _positions(body, tokens), body.child("embeddings")
    embeddings.only("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        positions=positions(table), embedding_norm=norm(embeddings.child("LayerNorm"))
    )
    blocks = [_distilled_block(b) if b.kind.startswith(_DISTIL) else _block(b) for b in _layers(body)]
    layers["blocks"], layers["pool"] = nn.Sequential(*blocks), ClassPool()
    layers.update(_head(part, body))
    return (tokens, table.shape[2]), layers


def text_view(part: Part) -> View:
    """The modules of a text classifier that correspond to layers of its network, and its call on embeddings."""
    body = part.child(_BODIES[part.kind])
    pairs = [Pair(f"{body.path}.embeddings", "embedding_norm")]
    for i, layer in enumerate(_layers(body)):
        distilled = layer.kind.startswith(_DISTIL)
        pairs += [
            Pair(f"{layer.path}.{'sa_layer_norm' if distilled else 'attention'}", f"blocks.{i}.attention_norm"),
            Pair(layer.path, f"blocks.{i}"),
        ]
    return View(tuple(pairs), _call)


def _call(model: Any, x: Tensor) -> Any:
    return model(inputs_embeds=x)


def _layers(body: Part) -> list[Part]:
    encoder = "transformer" if hasattr(body.module, "transformer") else "encoder"
    return body.child(encoder).child("layer").children()


def _positions(body: Part, tokens: int) -> Tensor:
    """The table that is added to the word embeddings: the positions and the first token type."""
    theirs = body.module.embeddings
    first = theirs.padding_idx + 1 if hasattr(theirs, "padding_idx") else 0  # RoBERTa counts from the padding index
    most = theirs.position_embeddings.num_embeddings - first
    if not 1 <= tokens <= most:
        raise ConfigError(f"the model takes between 1 and {most} tokens, not {tokens}")
    table: Tensor = theirs.position_embeddings.weight[first : first + tokens]
    if hasattr(theirs, "token_type_embeddings"):
        table = theirs.token_type_embeddings.weight[:1] + table
    return table.unsqueeze(0)


def _block(part: Part) -> Block:
    if part.kind not in (f"{_BERT}Layer", f"{_ROBERTA}Layer"):
        raise part.refused()
    part.only("attention", "intermediate", "output")
    theirs, output = part.child("attention"), part.child("output")
    if theirs.kind not in ATTENTIONS:
        raise theirs.refused()
    inner, behind = theirs.child("self"), theirs.child("output")
    if inner.kind not in SELF_ATTENTIONS:
        raise inner.refused()
    qkv = stacked([inner.child(name) for name in ("query", "key", "value")])
    expand = part.child("intermediate")
    mlp = feed_forward(
        linear(expand.child("dense")),
        activation(expand.child("intermediate_act_fn")),
        linear(output.child("dense")),
    )
    return _post_norm(
        attention(qkv, linear(behind.child("dense")), inner.module.num_attention_heads),
        norm(behind.child("LayerNorm")),
        mlp,
        norm(output.child("LayerNorm")),
    )


def _distilled_block(part: Part) -> Block:
    if part.kind != f"{_DISTIL}TransformerBlock":
        raise part.refused()
    part.only("attention", "sa_layer_norm", "ffn", "output_layer_norm")
    inner, mlp = part.child("attention"), part.child("ffn")
    if inner.kind not in DISTILLED_ATTENTIONS:
        raise inner.refused()
    qkv = stacked([inner.child(name) for name in ("q_lin", "k_lin", "v_lin")])
    return _post_norm(
        attention(qkv, linear(inner.child("out_lin")), inner.module.n_heads),
        norm(part.child("sa_layer_norm")),
        feed_forward(linear(mlp.child("lin1")), activation(mlp.child("activation")), linear(mlp.child("lin2"))),
        norm(part.child("output_layer_norm")),
    )


def _post_norm(first: nn.Module, first_norm: nn.Module, second: nn.Module, second_norm: nn.Module) -> Block:
    return Block(
        OrderedDict(
            attention=Residual(first), attention_norm=first_norm, mlp=Residual(second), mlp_norm=second_norm
        )
    )


def _head(part: Part, body: Part) -> "OrderedDict[str, nn.Module]":
    """The linear map, the activation and the classifier of the head."""
    if part.kind.startswith(_BERT):
        pooler = body.child("pooler")
        first, act, last = pooler.child("dense"), activation(pooler.child("activation")), part.child("classifier")
    elif part.kind.startswith(_ROBERTA):
        head = part.child("classifier")
        head.only("dense", "out_proj")
        first, act, last = head.child("dense"), nn.Tanh(), head.child("out_proj")
    else:
        first, act, last = part.child("pre_classifier"), nn.ReLU(), part.child("classifier")
    return OrderedDict(pre_head=linear(first), pre_activation=act, head=classifier(last))
