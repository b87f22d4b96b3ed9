// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

import (
	"context"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Of two writes without an answer, the one that can still take effect counts, whichever was noted first.
func TestADoubtIsAboutTheClaimAsItIs(t *testing.T) {
	at := func(version string) *resourceapi.ResourceClaim {
		return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "c", UID: "c-uid", ResourceVersion: version}}
	}
	conflict := apierrors.NewConflict(resourceapi.Resource("resourceclaims"), "c", nil)
	for name, noted := range map[string][]string{
		"one": {"2"}, "the older one first": {"1", "2"}, "the older one last": {"2", "1"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDoubts(func(string, string) (*resourceapi.ResourceClaim, error) { return at("2"), nil })
			for i, version := range noted {
				d.Note(at(version), []error{context.DeadlineExceeded, conflict}[i])
			}
			if !d.about(at("2")) {
				t.Error("a write on version 2 is forgotten")
			}
			if d.about(at("1")) {
				t.Error("a write on version 1 can take effect")
			}
		})
	}
}
