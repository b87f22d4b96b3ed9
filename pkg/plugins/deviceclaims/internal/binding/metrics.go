// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

import (
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/metric"
)

// Values of the label "write".
const (
	WriteFinalizer    = "finalizer"
	writeAdoption     = "adoption"
	writeAllocation   = "allocation"
	WriteDeallocation = "deallocation"
	writeUndo         = "undo"
	WriteWithdrawal   = "withdrawal"
	WriteCreation     = "creation"
	WriteDeletion     = "deletion"
)

var (
	// WritesTotal are the writes, as [CountWrite] counts them.
	WritesTotal = metric.CounterVec("claim_writes_total",
		"Number of writes to ResourceClaims, by what was written and result: success, conflict or error.", "write", "result")
	// UndosTotal are the claims that Unreserve had something to take back from.
	UndosTotal = metric.CounterVec("claim_undos_total",
		"Number of times that what was written to a claim was to be taken back, by result: done, kept (the pod is bound, or "+
			"may be), or failed.", "result")
)

// CountWrite counts a request that was to change a claim, and what became of it.
func CountWrite(write string, err error) {
	result := "success"
	switch {
	case apierrors.IsConflict(err):
		result = "conflict"
	case err != nil:
		result = "error"
	}
	WritesTotal.WithLabelValues(write, result).Inc()
}

func countUndo(kept bool, err error) {
	result := "done"
	switch {
	case err != nil:
		result = "failed"
	case kept:
		result = "kept"
	}
	UndosTotal.WithLabelValues(result).Inc()
}
