// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podevents

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/kubernetes/pkg/apis/core/validation"

	"stowage.dev/stowage/pkg/usage"
)

// Note is an error's text, cut to what the API server allows in an event.
func Note(err error) string {
	const cut = " ..."
	note := err.Error()
	if len(note) > validation.NoteLengthLimit {
		note = strings.ToValidUTF8(note[:validation.NoteLengthLimit-len(cut)], "") + cut
	}
	return note
}

// Pod stands for a pod in events. It has no resource version: each write of the pod's status changes that, and events that differ in
// it are not counted as one.
func Pod(object runtime.Object) runtime.Object {
	pod, ok := object.(*v1.Pod)
	if !ok {
		return object
	}
	return &v1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
}

// Claim stands for a claim in events.
func Claim(name types.NamespacedName) runtime.Object {
	return &resourceapi.ResourceClaim{
		TypeMeta:   metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim"},
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
	}
}

// Join makes one text of those that are not empty.
func Join(texts ...string) string {
	return strings.Join(slices.DeleteFunc(texts, func(text string) bool { return text == "" }), "; ")
}

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
