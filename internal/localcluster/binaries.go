// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"io"

	"stowage.dev/stowage/internal/localcluster/build"
)

// Binaries tells where the cluster's programs are.
type Binaries = build.Binaries

// BinarySet names programs that are needed together.
type BinarySet = build.Set

// The sets of programs that EnsureBinaries can build.
const (
	ControlPlane   = build.ControlPlane
	StockScheduler = build.StockScheduler
	Node           = build.Node
)

// EnsureBinaries builds the programs of the sets that are not in the cache yet;
// see build.Ensure. Start calls it for what it needs itself.
func EnsureBinaries(ctx context.Context, progress io.Writer, sets ...BinarySet) (Binaries, error) {
	return build.Ensure(ctx, progress, sets...)
}
