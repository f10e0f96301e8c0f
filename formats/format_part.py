"""A rule's part of a converted format: arrays of its axes, and the slot of each element."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.index_arrays import index_type


class FormatPart:
    """A set of coordinates stored by one rule.

    At least one of `places` and `elements` is required.

    Parameters
    ----------
    rule : FormatRewriteRule
        The rule.
    indices : dict of str to array or int
        Index arrays and sizes by their names in a decomposed program.
    shape : tuple of int
        Shape of the values and the mask: one dimension up to the last sparse axis, then the dense
        axes after it.
    count : int
        Number of elements of the pattern.
    places : (count,) ndarray, optional
        The slot of each element in the flat values of the new format; -1 for elements that the
        format does not store.
    elements : (size,) ndarray, optional
        The inverse: the element of each slot, `count` for padding.
    """

    rule: FormatRewriteRule
    indices: dict[str, Any]
    shape: tuple[int, ...]
    count: int

    def __init__(
        self,
        rule: FormatRewriteRule,
        indices: dict[str, Any],
        shape: tuple[int, ...],
        count: int,
        places: np.ndarray | None = None,
        elements: np.ndarray | None = None,
    ) -> None:
        if places is None and elements is None:
            raise ValueError("FormatPart: expected 'places' or 'elements', got neither")
        self.rule, self.indices, self.shape, self.count = rule, indices, shape, count
        if places is not None:
            self.places = places
        if elements is not None:
            self.elements = elements.reshape(-1)

    @cached_property
    def places(self) -> np.ndarray:
        at = np.flatnonzero(self.elements < self.count)
        out = np.full(self.count, -1, np.intp)
        out[self.elements[at]] = at
        return out

    @cached_property
    def elements(self) -> np.ndarray:
        out = np.full(self.size, self.count, index_type(self.count))
        taken = np.flatnonzero(self.places >= 0)
        out[self.places[taken]] = taken
        return out

    @property
    def size(self) -> int:
        """The number of slots, padding included."""
        return math.prod(self.shape)

    @cached_property
    def stored(self) -> int:
        """The number of elements that the format takes."""
        known = self.__dict__.get("places")
        if known is not None:
            return int(np.count_nonzero(known >= 0))
        return int(np.count_nonzero(self.elements < self.count))

    @property
    def padding(self) -> float:
        """The share of slots without an element."""
        return 1.0 - self.stored / self.size if self.size else 0.0

    @property
    def full(self) -> bool:
        """Whether every slot holds an element."""
        return self.stored == self.size

    @cached_property
    def mask(self) -> np.ndarray:
        """The mask: 1 where an element is stored, of `shape`, int8."""
        if "elements" in self.__dict__:
            return (self.elements < self.count).view(np.int8).reshape(self.shape)
        out = np.zeros(self.size, np.int8)
        out[self.places if self.stored == self.count else self.places[self.places >= 0]] = 1
        return out.reshape(self.shape)

    @property
    def arguments(self) -> dict[str, Any]:
        """`indices` and, if the rule has one, the mask: a kernel's arguments except values."""
        mask = {self.rule.renamed("mask"): self.mask} if self.rule.masked else {}
        return {**self.indices, **mask}

    def within(self, positions: np.ndarray, count: int) -> FormatPart:
        """The same part for a larger set of elements, of which it stores a subset.

        Parameters
        ----------
        positions : ndarray
            Positions of the elements that it stores.
        count : int
            Number of all elements.

        Returns
        -------
        FormatPart
        """
        if "elements" in self.__dict__:
            wide = np.append(positions, count).astype(index_type(count), copy=False)
            return FormatPart(
                self.rule, self.indices, self.shape, count, elements=wide.take(self.elements)
            )
        places = np.full(count, -1, np.intp)
        places[positions] = self.places
        out = FormatPart(self.rule, self.indices, self.shape, count, places)
        if "mask" in self.__dict__:
            out.mask = self.mask
        return out

    def values(self, stored: np.ndarray) -> np.ndarray:
        """Values of the new format, zero for padding.

        Parameters
        ----------
        stored : (count,) ndarray
            Values in the order of `coords`.

        Returns
        -------
        ndarray
            Values of shape `shape`.
        """
        stored = np.asarray(stored)
        if stored.shape != (self.count,):
            raise ValueError(
                f"FormatPart '{self.rule.name}': argument 'stored': expected shape "
                f"({self.count},), got {stored.shape}"
            )
        if "elements" in self.__dict__ and self.count:
            out = stored.take(self.elements, mode="clip")  # the last element for padding
            if not self.full:
                out[self.elements == self.count] = 0
            return out.reshape(self.shape)
        out = np.zeros(self.size, stored.dtype)
        if self.stored == self.count:
            out[self.places] = stored
        else:
            taken = self.places >= 0
            out[self.places[taken]] = stored[taken]
        return out.reshape(self.shape)

    def restore(self, values: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """The elements, in the order of `coords`, from the values of the new format.

        Parameters
        ----------
        values : ndarray
            Values of shape `shape`.
        out : (count,) ndarray, optional
            The array to write to; elements that the format does not store keep their values
            (zero in a new array).

        Returns
        -------
        (count,) ndarray
        """
        values = np.asarray(values)
        if values.shape not in (self.shape, (self.size,)):
            raise ValueError(
                f"FormatPart '{self.rule.name}': argument 'values': expected shape "
                f"{self.shape}, got {values.shape}"
            )
        flat = values.reshape(-1)
        if "places" in self.__dict__ and self.stored == self.count and out is None:
            return flat[self.places]
        out = np.zeros(self.count, values.dtype) if out is None else out
        if "elements" in self.__dict__:
            taken = slice(None) if self.full else self.elements < self.count
            out[self.elements[taken]] = flat[taken]
            return out
        taken = self.places >= 0
        out[taken] = flat[self.places[taken]]
        return out
