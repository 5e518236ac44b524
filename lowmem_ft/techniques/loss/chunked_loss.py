"""A causal LM whose loss never holds the logits of a whole batch.

Axes: B rows, T tokens of a row, H hidden size, N tokens of the batch (B * T), L tokens that have a label.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowmem_ft.foundation.devices import has_values
from lowmem_ft.foundation.errors import ModelError, raise_problems
from lowmem_ft.foundation.handle import Handle
from lowmem_ft.foundation.out_of_memory_errors import is_failed_allocation
from lowmem_ft.techniques.adapters.trained_rows import trained_rows_of
from lowmem_ft.techniques.loss.config import LossConfig
from lowmem_ft.techniques.loss.head_tiles import HeadTiles
from lowmem_ft.techniques.loss.linear_cross_entropy import linear_cross_entropy_sum
from lowmem_ft.techniques.loss.router_loss import has_router_loss, weighted_router_loss
from lowmem_ft.techniques.modules.model_parts import ModelParts
from lowmem_ft.techniques.modules.patching import evaluating, set_attribute, wrap_method
from lowmem_ft.techniques.technique import Technique
from lowmem_ft.techniques.tiling.config import TilingConfig

__all__ = ["enable_chunked_loss"]

log = logging.getLogger(__name__)

_IGNORED = -100
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config fields of the logits' softcap: Gemma 2 and later, RecurrentGemma, xLSTM."""
_FACTORS = ("logit_scale", "lm_head_multiplier")
"""Config fields of a factor on the logits: Cohere, Falcon-H1."""
_LOGITS_SCALING_POWER = {"hyperclovax": 1, "minicpm3": 0}
"""Exceptions to Granite and its kin, which divide the logits by ``logits_scaling``.

These multiply the logits by it, or divide the head's input.
"""

SMALLEST_CHUNK = 32
"""Tokens of the smallest chunk: the logits of fewer take almost no memory, even with a vocabulary of 250,000 tokens."""


class ChunkedLoss(Technique):
    """A chunked loss that is enabled, and whose head may be supplied in tiles."""

    def __init__(self, causal_lm: Any, loss: _Loss) -> None:
        self._causal_lm, self._loss = causal_lm, loss
        self._stock_forward = causal_lm.forward
        super().__init__(
            wrap_method(causal_lm, "forward", functools.partial(_chunked_forward, causal_lm, loss))
        )

    def compare_with_stock(self) -> None:
        """Run two forwards of 8 tokens; if the parameters are sharded among processes, all of them must call this.

        Raises:
            ModelError: if the stock loss is another one.
        """
        _check_equals_stock(self._causal_lm, self._loss.head, self._stock_forward)

    def before_forward(self, input_ids_BT: Tensor, num_label_tokens: int | None) -> dict[str, Any]:
        """Pass on the number of labels if it is known, so that the loss need not wait for the device."""
        return {} if num_label_tokens is None else {"num_label_tokens": num_label_tokens}

    @property
    def is_running(self) -> bool:
        """True if a loss has begun and not ended, possibly because of an error in it."""
        return self._loss.is_running

    def abandon(self) -> None:
        """Mark the failed loss as ended."""
        self._loss.is_running = False

    def smaller_chunk(self, num_label_tokens: int) -> int | None:
        """Return half of the tokens whose logits exist at once with so many labels; None: it is small already."""
        half = min(self._loss.chunk_tokens, num_label_tokens) // 2
        return half if half >= SMALLEST_CHUNK else None

    def limit_chunk(self, max_tokens: int | None) -> None:
        """Limit the tokens whose logits exist at once; None: the recipe's ``chunk_tokens`` is the limit."""
        chosen = self._loss.config.chunk_tokens
        assert chosen is not None, "this technique needs chunk_tokens"
        self._loss.chunk_tokens = chosen if max_tokens is None else min(chosen, max_tokens)

    def take_head_from(self, tiles: HeadTiles | None) -> None:
        """Take the head's weight from ``tiles`` from now on; None: from the head again."""
        self._loss.head_tiles = tiles

    def sum_head_in_product(self) -> Callable[[], None]:
        """Add the head's gradient to its weight's float32 ``.grad`` from now on; return the call that ends it."""
        weight = self._loss.head.linear.weight
        return set_attribute(
            self._loss, "sums_in_product", weight.requires_grad and weight.dtype.itemsize < 4
        )


def enable_chunked_loss(
    model: nn.Module | ModelParts,
    config: LossConfig,
    tiling: TilingConfig | None = None,
    *,
    device: torch.device | None = None,
    compare: bool = True,
) -> ChunkedLoss | Technique:
    """Make ``model(input_ids=..., labels=...)`` return its loss without ever holding all logits.

    The output is the model's own, with ``logits=None``. ``num_items_in_batch`` and ``shift_labels`` mean the same as in
    transformers; with ``num_label_tokens``, the number of labels (after the shift) that are not -100, the rows are
    picked without a host sync. Without ``labels`` forward is untouched, so generation works.

    Frees: logits, their fp32 copy, the probabilities and the gradient, each tokens x vocabulary; chunk_tokens x
    vocabulary remains, or with ``tiling.head`` a part of the vocabulary. Tokens without a label skip the head.
    Costs: see :func:`linear_cross_entropy_sum`; once, two forwards of 8 tokens, which check on real weights that this
    model's loss is reproduced (some architectures do more around the head than the config shows).
    Equals: transformers' ``ForCausalLMLoss`` and, with routers' logits on, its load-balancing loss; in train mode with
    labels smoothed as by ``torch.nn.functional.cross_entropy``. One difference: a batch in which all labels are ignored
    has the mean 0, not NaN.
    Limits: the head must be a plain ``nn.Linear``. Meta and fake weights cannot be checked and are accepted. For a
    model kept on the host to be streamed, the check runs only the parts around the layers: their kernels may exist only
    on the device, and the host would take minutes for them.

    Args:
        model: a causal LM from transformers, or a PEFT model around one; or its parts.
        config: the chunk size and the share of label smoothing.
        tiling: the number of vocabulary tiles; None: one.
        device: the device that the model will compute on; None: that of its weights.
        compare: whether the weights already have their values; if not, call ``compare_with_stock`` once they do.

    Returns:
        A handle whose ``remove()`` restores the stock forward; with ``chunk_tokens=None`` a plain one.

    Raises:
        UserError: if a value is out of its range.
    """
    tiling = tiling or TilingConfig()
    raise_problems((*config.problems(), *tiling.problems()))
    if config.chunk_tokens is None:
        return Technique()
    parts = ModelParts.of(model)
    causal_lm = parts.base
    head = _Head.of(causal_lm)
    tiling.refuse_vocabulary(len(head.linear.weight))
    loss = _Loss(head, config, tiling, config.chunk_tokens)
    is_here = device is None or device.type == head.linear.weight.device.type
    technique = ChunkedLoss(causal_lm, loss)
    if compare:
        try:
            with contextlib.nullcontext() if is_here else _without_layers(parts):
                technique.compare_with_stock()
        except BaseException:
            technique.remove()
            raise
    log.info(
        "Loss: logits of at most %d tokens%s at once, gradients computed in the forward pass.",
        config.chunk_tokens,
        f" and 1/{tiling.head} of the vocabulary" if tiling.head > 1 else "",
    )
    return technique


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The last linear layer, and what the architecture does to its logits."""

    linear: nn.Linear
    logit_softcap: float | None
    logit_scale: float

    @classmethod
    def of(cls, causal_lm: Any) -> _Head:
        linear = causal_lm.get_output_embeddings() if hasattr(causal_lm, "get_output_embeddings") else None
        if isinstance(getattr(linear, "base_layer", None), nn.Linear):
            raise ModelError(
                f"loss.chunk_tokens multiplies by the head's own weight, and the head of {type(causal_lm).__name__} "
                "has an adapter. Leave the head (lm_head) out of adapter.target_modules, or set loss.chunk_tokens=null."
            )
        if not isinstance(linear, nn.Linear):
            raise ModelError(
                f"loss.chunk_tokens needs a model whose head is an nn.Linear; that of {type(causal_lm).__name__} is "
                f"{type(linear).__name__}. Set loss.chunk_tokens=null."
            )
        config = causal_lm.config.get_text_config()
        softcaps = [cap for name in _SOFTCAPS if (cap := getattr(config, name, None)) is not None]
        return cls(
            linear=linear, logit_softcap=softcaps[0] if softcaps else None, logit_scale=_logit_scale(config)
        )

    def logits(self, hidden_BTH: Tensor) -> Tensor:
        logits_BTV = F.linear(hidden_BTH, self.linear.weight, self.linear.bias).float() * self.logit_scale
        if self.logit_softcap is None:
            return logits_BTV
        return torch.tanh(logits_BTV / self.logit_softcap) * self.logit_softcap


@dataclass
class _Loss:
    head: _Head
    config: LossConfig
    tiling: TilingConfig
    chunk_tokens: int
    head_tiles: HeadTiles | None = None
    sums_in_product: bool = False
    is_running: bool = False

    def mean(self, hidden_LH: Tensor, labels_L: Tensor, num_items: int | Tensor, *, smooth: bool) -> Tensor:
        self.is_running = True
        loss = linear_cross_entropy_sum(
            hidden_LH,
            self.head.linear.weight,
            labels_L,
            bias_V=self.head.linear.bias,
            chunk_tokens=self.chunk_tokens,
            vocabulary_tiles=self.tiling.head,
            logit_softcap=self.head.logit_softcap,
            logit_scale=self.head.logit_scale,
            label_smoothing=self.config.label_smoothing_factor if smooth else 0.0,
            loss_factor=1 / num_items,
            head_tiles=self.head_tiles,
            sums_in_product=self.sums_in_product,
            trained_rows=trained_rows_of(self.head.linear),
        )
        self.is_running = False
        return loss


def _logit_scale(config: Any) -> float:
    scale = (getattr(config, "logits_scaling", None) or 1.0) ** _LOGITS_SCALING_POWER.get(
        config.model_type, -1
    )
    for name in _FACTORS:
        factor = getattr(config, name, None)
        scale *= factor if isinstance(factor, (int, float)) else 1.0
    return scale


def _chunked_forward(causal_lm: Any, loss_of: _Loss, stock_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stock forward, with the loss computed where the head would compute the logits."""
    signature = inspect.signature(stock_forward)
    linear = loss_of.head.linear

    # Trainer reads the signature to learn which columns and loss arguments forward takes.
    @functools.wraps(stock_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        kwargs = {**signature.bind_partial(*args).arguments, **kwargs}
        num_label_tokens = kwargs.pop("num_label_tokens", None)
        labels_BT = kwargs.pop("labels", None)
        if labels_BT is None:
            return stock_forward(**kwargs)
        num_items = kwargs.pop("num_items_in_batch", None)
        return_dict = kwargs.pop("return_dict", None)
        targets_N = _shifted(labels_BT, kwargs.pop("shift_labels", None)).flatten()
        losses: list[Tensor] = []

        def loss_instead_of_logits(hidden_BTH: Tensor) -> Tensor:
            hidden_NH = hidden_BTH.flatten(0, -2)
            if len(hidden_NH) != len(targets_N):
                raise ValueError(
                    f"{len(targets_N)} labels do not match the {len(hidden_NH)} positions that reach the head."
                )
            labels_N = targets_N.to(hidden_BTH.device)
            rows_L = _label_rows(labels_N, num_label_tokens)
            count = max(len(rows_L), 1) if num_items is None else num_items
            hidden_LH = hidden_NH.index_select(0, rows_L)
            losses.append(loss_of.mean(hidden_LH, labels_N[rows_L], count, smooth=causal_lm.training))
            # The architecture's work on the logits costs almost nothing on this. No view: FSDP2 hooks onto it.
            return hidden_BTH[..., :1].clone()

        # Inside the head's own call, so that hooks that gather or cast its weight there still work.
        with Handle(set_attribute(linear, "forward", loss_instead_of_logits)):
            outputs = stock_forward(**kwargs, return_dict=True)
        (loss,) = losses
        of_routers = weighted_router_loss(causal_lm, outputs)
        loss = loss if of_routers is None else loss + of_routers
        outputs = type(outputs)(**{**outputs, "loss": loss, "logits": None})
        wants_dict = causal_lm.config.return_dict if return_dict is None else return_dict
        return outputs if wants_dict else outputs.to_tuple()

    return forward


def _shifted(labels_BT: Tensor, shift_labels_BT: Tensor | None) -> Tensor:
    """Return the label of the token after each token, as transformers shifts them."""
    if shift_labels_BT is not None:
        return shift_labels_BT
    return F.pad(labels_BT, (0, 1), value=_IGNORED)[..., 1:]


def _label_rows(targets_N: Tensor, num_label_tokens: int | None) -> Tensor:
    """Return the indices of the rows that have a label; if their number is given, without waiting for the device."""
    has_label_N = targets_N != _IGNORED
    if num_label_tokens is None:
        return has_label_N.nonzero().squeeze(1)
    torch._assert_async(
        has_label_N.sum() == num_label_tokens,
        "num_label_tokens is not the number of shifted labels other than -100",
    )
    return torch.nonzero_static(has_label_N, size=num_label_tokens).squeeze(1)


def _check_equals_stock(causal_lm: Any, head: _Head, stock_forward: Callable[..., Any]) -> None:
    """Compare logits and loss with the stock forward's on a few tokens, if the weights hold numbers.

    Modules are called, not their forwards, so that hooks that gather a weight for a call run.
    """
    weight = head.linear.weight
    if any(parameter.is_meta for parameter in causal_lm.parameters()):
        log.info("Loss: not compared with the stock loss, because the weights are on the meta device.")
        return
    tokens_BT = torch.randint(len(weight), (1, 8), generator=torch.Generator().manual_seed(0))
    tokens_BT = tokens_BT.to(weight.device)
    inputs = {"input_ids": tokens_BT, "labels": tokens_BT, "return_dict": True, "use_cache": False}
    num_labels = tokens_BT.numel() - 1  # the first token is not predicted
    # flash-attn does not support fp32, so fp32 weights with it will train under autocast; compare them there.
    flash = "flash" in (causal_lm.config._attn_implementation or "") and weight.dtype == torch.float32
    dtype = torch.bfloat16 if flash else weight.dtype
    logits: list[Tensor] = []
    with evaluating(causal_lm), torch.no_grad(), torch.autocast(weight.device.type, dtype, enabled=flash):
        with (
            Handle(set_attribute(causal_lm, "forward", stock_forward)),
            head.linear.register_forward_pre_hook(lambda module, args: logits.append(head.logits(args[0]))),
        ):
            stock = _stock_outputs(causal_lm, inputs)
        equal = (
            len(logits) == 1
            and _close(logits[0], stock.logits, dtype)
            and _close(causal_lm(**inputs, num_label_tokens=num_labels).loss, stock.loss, dtype)
        )
    if equal:
        return
    raise ModelError(
        f"loss.chunk_tokens needs a loss that is the cross-entropy of a linear head with a known scale and softcap; "
        f"{type(causal_lm).__name__} computes something else from its hidden states. Set loss.chunk_tokens=null."
    )


def _stock_outputs(causal_lm: Any, inputs: dict[str, Any]) -> Any:
    """Run the stock forward, which in models of several parts may need more than text."""
    try:
        return causal_lm(**inputs)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_failed_allocation(error):
            raise
        if getattr(causal_lm, "hf_quantizer", None) is not None:
            raise ModelError(
                f"model.quantization packs the weights of linear layers, but the forward of {type(causal_lm).__name__} "
                f"fails with packed ones: {type(error).__name__}: {error} Set model.quantization=none."
            ) from error
        raise ModelError(
            f"loss.chunk_tokens needs a model that takes text alone, but the forward of {type(causal_lm).__name__} "
            f"fails with it: {type(error).__name__}: {error} Use a decoder-only text model, such as one of "
            "`lowmem-ft models`."
        ) from error


def _close(ours: Tensor, stock: Tensor, dtype: torch.dtype) -> bool:
    """Return whether both are equal up to a few roundings of ``dtype``, relative to the largest value.

    The stock forward scales and caps in ``dtype``.
    """
    if ours.shape != stock.shape:
        return False
    tolerance = max(1e-4, 4 * torch.finfo(dtype).eps)
    difference = (ours.float() - stock.float()).abs().max()
    is_close = difference <= tolerance * stock.float().abs().max()
    # Without values, as in a trace, there is nothing to compare: only the memory of the comparison counts.
    return not has_values(is_close) or bool(is_close)


@contextlib.contextmanager
def _without_layers(parts: ModelParts) -> Iterator[None]:
    """Make the model pass its embeddings to its last norm and head; with routers' losses, through its last layer."""
    layers, config = parts.layers(way_out="offload.parameters=device"), parts.base.config
    stack = list(layers)
    configs = {"": config} | {key: part for key in config.sub_configs if (part := getattr(config, key, None))}
    attention = {key: one._attn_implementation for key, one in configs.items()}
    # A load-balancing loss needs a router, and if only some layers have one, the last one does.
    num_kept = 1 if has_router_loss(parts.base) else 0
    del layers[: len(stack) - num_kept]
    config._attn_implementation = "eager"  # the device's kernel may not run on the host
    try:
        yield
    finally:
        del layers[:]
        layers.extend(stack)
        config._attn_implementation = attention
