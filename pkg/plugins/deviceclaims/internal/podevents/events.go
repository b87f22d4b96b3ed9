// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podevents

import (
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/kubernetes/pkg/apis/core/validation"
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
