// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podevents

import (
	"context"
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Failure says in a word why a request failed, the same word each time it fails for the same reason. It is "" without an error.
func Failure(err error) string {
	switch reason := apierrors.ReasonForError(err); {
	case err == nil:
		return ""
	case reason != metav1.StatusReasonUnknown:
		return string(reason)
	case errors.Is(err, context.DeadlineExceeded):
		return string(metav1.StatusReasonTimeout)
	default:
		return "Unanswered"
	}
}
