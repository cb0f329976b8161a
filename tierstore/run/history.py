"""The steps done so far: how many, and all that a commit says of them besides the pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierstore.layout.parameters import PagedGroup
from tierstore.paging.page import Page
from tierstore.paging.page_table import encode_hyperparameters, layout_digest
from tierstore.run import tagged_json
from tierstore.run.manifest import Manifest, RunIdentity


class History:
    """What changed since the last commit, and what the next one will hold."""

    def __init__(self) -> None:
        self.step = 0
        self.scalars: dict[str, dict[str, float]] = {}
        """Parameter name -> scalar name -> value."""
        self.extra: Any = None
        """What was given to the commit that was restored."""
        self.changed = False
        """Whether a page was written since a commit was begun."""
        self.groups_written = 0
        """Groups attached later have no pages yet and are in no commit."""
        self._next_extra: tuple[int, Any] = (0, None)  # A step, and what to commit with it.

    def wrote(self, groups: int) -> None:
        """Note that pages were written, those of so many groups being all there now."""
        self.changed, self.groups_written = True, groups

    def annotate(self, extra: Any) -> None:
        """Keep a copy of what the commit of this step shall hold.

        Raises:
            TypeError, ValueError: no commit can hold it.
        """
        self._next_extra = (self.step, tagged_json.encode(extra, name="extra"))

    @property
    def is_committed(self) -> bool:
        """Whether a commit of everything was begun: there is nothing new to say."""
        return not self.changed and not (self.step and self._next_extra[0] == self.step)

    def manifest(
        self,
        identity: RunIdentity,
        *,
        attempt: str,
        before: Manifest | None,
        groups: Sequence[PagedGroup],
        pages: Sequence[Page],
        shared: bool,
    ) -> Manifest:
        """Return the manifest of this step: a copy of all that later steps will change.

        Args:
            identity: the run.
            attempt: this opening of it.
            before: the commit before it, if there is one.
            groups: all groups; those without pages are left out.
            pages: theirs.
            shared: whether other ranks have a part of the groups.

        Raises:
            TypeError, ValueError: a hyperparameter or a scalar that no commit can hold.
        """
        groups = groups[: self.groups_written]
        pages = [page for page in pages if page.layout.subgroup.group < len(groups)]
        entries = [page.entry for page in pages if page.entry is not None]
        assert len(entries) == len(pages)
        extra_step, extra = self._next_extra
        return Manifest(
            run_id=identity.run_id,
            attempt=attempt,
            rank=identity.rank,
            world_size=identity.world_size,
            step=self.step,
            number=before.number + 1 if before and before.step == self.step else 1,
            first=before is None,
            page_bytes=identity.page_bytes,
            groups=[[parameter.spec for parameter in group.parameters] for group in groups],
            layout=layout_digest(page.layout for page in pages),
            pages=entries,
            subgroups=[page.layout.subgroup for page in pages] if shared else None,
            scalars=tagged_json.encode(self.scalars, name="scalars"),
            hyperparameters=[encode_hyperparameters(i, group) for i, group in enumerate(groups)],
            extra=extra if extra_step == self.step else None,
        )

    def committed(self) -> None:
        """Note that a commit of everything was begun."""
        self._next_extra = (0, None)
        self.changed = False

    def go_on_from(self, manifest: Manifest, groups: Sequence[PagedGroup]) -> None:
        """Make a commit the present, and give the groups their hyperparameters back."""
        for group, saved in zip(groups, manifest.hyperparameters, strict=True):
            group.hyperparameters.update(tagged_json.decode(saved))
        self.scalars = tagged_json.decode(manifest.scalars)
        self.extra = tagged_json.decode(manifest.extra)
        self.step = manifest.step
        self.groups_written = len(groups)
        self.committed()
