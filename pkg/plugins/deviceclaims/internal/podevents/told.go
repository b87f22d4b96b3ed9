// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podevents

import (
	"fmt"
	"strings"

	"stowage.dev/stowage/pkg/usage"
)

// ToldError is an error in words that the pod's user may read.
type ToldError struct {
	Text string
	Err  error
}

func (e *ToldError) Error() string { return e.Text }
func (e *ToldError) Unwrap() error { return e.Err }

// WithoutForeign takes the claim out of the text of an error if it is of another namespace.
func WithoutForeign(text, namespace string, claim usage.ClaimRef) string {
	if claim.Namespace == namespace {
		return text
	}
	return strings.ReplaceAll(text, fmt.Sprintf("claim %s (UID %s)", claim, claim.UID), "a claim of another namespace")
}
