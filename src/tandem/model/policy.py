"""Any causal language model of transformers as a Policy: full fine-tuning or LoRA.

Shapes: T tokens that are computed, N trained tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.errors import SpecError, SyncError
from tandem.model import frozen_context, served_weights
from tandem.model.activation_memory import Activations
from tandem.model.activation_memory import Policy as ActivationPolicy
from tandem.model.export_copy import Deployer, name_ends
from tandem.model.forward import Forward, check_gradient, why_alone
from tandem.model.lora import add_lora
from tandem.model.quantized_base import merged, quantized_parts
from tandem.model.warm_start import begin_adapter
from tandem.ops import attention_masks, packed_attention, recurrent_layers
from tandem.ops.lm_head import Head
from tandem.ops.module_parts import tables_of
from tandem.ops.named_tensors import live_tensors, move_in, stand_on
from tandem.ops.vision import Vision, copied, sees
from tandem.protocols import ImageSource
from tandem.spec.model import LoraSpec
from tandem.types import MicroBatch, TokenLogprobs, WeightKind, Weights

Inside = Callable[..., Any]
"""`inside(function, *args)` calls the function while all weights of a module can be read. For a gradient, the function
must return tensors or tuples of tensors."""


def _directly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class CausalPolicy:
    """A policy over `module`, the transformers model itself; LoRA layers, if any, are inside it."""

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        *,
        lora: LoraSpec | None = None,
        adapter: str | None = None,
        activations: ActivationPolicy = "keep",
        packed: bool = False,
        compiled: bool = False,
        place: Callable[[Any, Any], Inside] | None = None,
        end_ids: Collection[int] = (),
        never_ends: Collection[int] = (),
        images: ImageSource | None = None,
        processor: Mapping[str, bytes] | None = None,
    ) -> None:
        """`adapter`: path of a saved adapter that `lora` starts from. `packed`, `compiled`: see model/forward.py.
        `place` gets the module and PEFT's view of it, moves its weights to their place, and returns how to run it.
        `end_ids`, `never_ends`: what ends an answer, and what does not; an export's configs say so. `images`: for a
        model that sees; without it, the model gets text only. `processor`: files that an export gets, too."""
        name_ends(module, tokenizer, end_ids, never_ends)
        self.module, self.tokenizer = module, tokenizer
        self.vision = Vision(module, images) if images is not None else None
        self._processor = dict(processor or {})
        self._adapter = add_lora(module, lora) if lora else None
        if lora and adapter:
            begin_adapter(self._adapter, lora, adapter)
        self._derived_names = served_weights.derived_names(module)
        self._inside: Inside = place(module, self._adapter) if place else _directly
        self._served_adapter = served_weights.StableAdapter(served_weights.adapted(module))
        self._reference: Head | None = None
        self._adapter_then: list[Tensor] = []
        self.context_grad = True
        """False: no gradient flows through tokens before a sequence's first trained token."""
        # Compiled layers decide themselves which activations to recompute.
        by_compiler = compiled and activations == "selective"
        self.activations = Activations(module, "keep" if by_compiler else activations)
        self.head = self._make_head(module)
        module.eval()  # even for training: with dropout it would not be the policy that the engine samples from
        why_not = _why_not_compiled(module, activations)
        self.forward: Forward = self._inside(
            lambda: Forward(module, packed=packed, compiled=compiled, selective=by_compiler, why_not_compiled=why_not)
        )
        if by_compiler and self.forward.why_not_compiled:
            self.activations = Activations(module, activations)
        self._inside(self.head.check, module)

    def check_gradient(self) -> None:
        """Raise SpecError if layers of this model compute no gradient here. For a policy that will be trained."""
        self.forward.why_in_torch = recurrent_layers.why_in_torch(self.module)
        self._inside(check_gradient, self.module)

    def _make_head(self, module: Any) -> Head:
        return Head(module, len(self.tokenizer), self.vision)

    # --- scoring

    def logprobs(self, micro: MicroBatch, temperature: float, top_p: float = 1.0) -> TokenLogprobs:
        with self.activations.watching():
            if not self.context_grad:
                if micro.images is not None:
                    raise SpecError("context_grad = 'none' does not support images; set context_grad = 'full'")
                if odd := attention_masks.beyond_masks(self.module.config):
                    raise SpecError(
                        f"context_grad = 'none' does not support layers of kind {', '.join(odd)}; set context_grad = "
                        "'full'"
                    )
                return frozen_context.logprobs(self.head, micro, temperature, top_p)
            return self._score(self.head, micro, temperature, top_p)

    @torch.no_grad()
    def score(self, micro: MicroBatch, temperature: float, top_p: float = 1.0) -> Tensor:
        """Return logprobs without a gradient."""
        return self._score(self.head, micro, temperature, top_p).logprobs_N

    def keep_reference(self) -> None:
        """Make the present weights the reference of `reference_logprobs`."""
        self._reference, self._adapter_then = None, []
        if self._adapter is None:
            frozen = copied(self.module, self.module).requires_grad_(False)
            self._reference = Head(frozen, len(self.tokenizer), self.vision)
        elif any(".lora_B." in name and tensor.any() for name, tensor in self.trainable()):
            self._adapter_then = [tensor.detach().clone() for _, tensor in self.trainable()]  # the base never moves

    def follow(self, teacher: Any) -> None:
        """Make another model with the same vocabulary the reference of `reference_logprobs`."""
        if sees(teacher.config) or self.vision is not None:
            raise SpecError(
                "algorithm.teacher: distillation does not support models that see images; name a policy and a teacher "
                "of text"
            )
        alone = why_alone(teacher)  # refuses what cannot be computed at all
        if not alone and self.forward.shares_freely and not packed_attention.why_not(teacher):
            packed_attention.engage(teacher)
        self._reference = Head(teacher.requires_grad_(False).eval(), len(self.tokenizer))
        self._reference.check(teacher)

    def reference_bytes(self) -> int:
        """Return the size of the weights that only the reference uses."""
        tensors: Iterable[Tensor] = self._adapter_then
        if self._reference is not None:
            parts = torch.nn.ModuleList([self._reference.body, self._reference.linear])  # a tied weight counts once
            shared = set(map(id, self.module.parameters()))  # the vision tower
            tensors = [tensor for tensor in parts.parameters() if id(tensor) not in shared]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @torch.no_grad()
    def reference_logprobs(self, micro: MicroBatch, temperature: float, top_p: float = 1.0) -> Tensor:
        if self._reference is not None:
            return self._score(self._reference, micro, temperature, top_p).logprobs_N
        with self._as_it_was():
            return self._score(self.head, micro, temperature, top_p).logprobs_N

    def divergence(self, micro: MicroBatch) -> Tensor:
        """Return KL(reference || policy) at each trained token, over the whole vocabulary, with a gradient."""
        reference = self._reference or self.head
        with torch.no_grad(), nullcontext() if self._reference else self._as_it_was():
            then_TH, source_N = self.forward.hidden(reference, micro)
        with self.activations.watching():
            now_TH, _ = self.forward.hidden(self.head, micro)
        return self.head.divergence(now_TH[source_N], reference, then_TH[source_N])

    def drop_reference(self) -> None:
        """Free the reference."""
        self._reference, self._adapter_then = None, []

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Use the reference adapter meanwhile; no adapter if it was zero when the reference was set."""
        if not self._adapter_then:
            with self._adapter.disable_adapter() if self._adapter is not None else nullcontext():
                yield
            return
        # Swap the storage: autograd would notice a write to a tensor that a pending backward needs.
        trained = [tensor for _, tensor in self.trainable()]
        now = [tensor.data for tensor in trained]
        try:
            for tensor, then in zip(trained, self._adapter_then, strict=True):
                tensor.data = then
            yield
        finally:
            for tensor, mine in zip(trained, now, strict=True):
                tensor.data = mine

    def _score(self, head: Head, micro: MicroBatch, temperature: float, top_p: float) -> TokenLogprobs:
        inside = self._inside_of(head)
        return TokenLogprobs(*inside(self._scored, head, micro, temperature, top_p))

    def _scored(self, head: Head, micro: MicroBatch, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
        hidden_TH, source_N = self.forward.hidden(head, micro)
        ids_N = micro.ids_BT.flatten()[micro.target_N]
        return head.logprobs(hidden_TH[source_N], ids_N, temperature, top_p)

    def _inside_of(self, head: Head) -> Inside:
        """Return how to run the module of this head, which is the policy's or its reference's."""
        return self._inside

    def head_bytes(self, num_tokens: int, top_p: float) -> tuple[int, int]:
        return self.head.buffer_bytes(num_tokens, top_p)

    def why_not_fused(self, top_p: float) -> str:
        return self.head.why_not_fused(top_p)

    def hides_activations(self) -> bool:
        return self.activations.hidden

    # --- weights

    def trainable(self) -> Sequence[tuple[str, Tensor]]:
        return [(name, tensor) for name, tensor in self.module.named_parameters() if tensor.requires_grad]

    def tables(self) -> set[str]:
        """Return the names of parameters with one row a token: embeddings and the head."""
        return tables_of(self.module, self.head.linear)

    def weights(self, version: int, kind: WeightKind) -> Weights:
        if kind == "live":
            return Weights(version, kind, lambda: live_tensors(self.module))
        if kind == "full":
            return Weights(version, kind, lambda: served_weights.whole(self.module, self._derived_names))
        if self._adapter is None:
            raise SyncError("this policy has no adapter to send; set [model.lora], or choose another sync.bridge")
        return Weights(version, kind, self._served_adapter.tensors, served_weights.adapter_config(self._adapter))

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the frozen weights under the adapters. The engine must have the same; they are never sent."""
        return served_weights.base(self.module)

    def base_in(self, storage: Mapping[str, Tensor]) -> int:
        """Move the base into memory that holds the same values and is never written; return the bytes freed."""
        return stand_on(served_weights.base_parameters(self.module), storage)

    def live_in(self, storage: Mapping[str, Tensor]) -> None:
        move_in(live_tensors(self.module), storage)

    def export(self, path: Path) -> None:
        """Write a checkpoint for transformers, vLLM and `tandem serve`. Adapters are merged and also saved apart."""
        if self._adapter is None:
            self.module.save_pretrained(path)
        else:
            self._adapter.save_pretrained(path / "adapter")
            few_bits = bool(quantized_parts(self.module))
            whole = merged(self.module) if few_bits else copied(self._adapter, self.module).merge_and_unload()
            whole.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        for name, content in self._processor.items():
            (path / name).write_bytes(content)

    def deployer(self) -> Callable[[Mapping[str, Tensor], Path], None]:
        """Return a function that writes such a checkpoint with given values, on any thread."""
        return Deployer(self.module, self._adapter, self.tokenizer, self._processor).write


def _why_not_compiled(module: Any, activations: ActivationPolicy) -> str:
    if activations == "offload":
        return "model.activations = 'offload' moves single tensors, and compiled layers do not expose them"
    if sees(module.config):
        return "a model that sees images adds their features between its layers, which was not tried with compiled ones"
    return "quantized weights use kernels that cannot be compiled" if quantized_parts(module) else ""
