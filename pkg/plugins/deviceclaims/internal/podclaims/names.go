// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package podclaims knows which claims a pod has, from the pod itself, and who uses a claim.
package podclaims

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// Name is a claim that a pod uses.
type Name struct {
	types.NamespacedName
	// Generated tells that the claim was made from a template for the pod or its group, which must be its owner.
	Generated bool
}

// NamesOf returns the claims that a pod uses, each once, by name. One that the pod names twice is generated if it is so once, so that
// the owner is checked. It fails if a claim is still to be made from its template.
func NamesOf(pod *v1.Pod) ([]Name, error) {
	var names []Name
	for i := range pod.Spec.ResourceClaims {
		ref := &pod.Spec.ResourceClaims[i]
		name, generated, err := resourceclaim.Name(pod, ref)
		switch {
		case errors.Is(err, resourceclaim.ErrClaimNotFound):
			return nil, &UnusableError{ReasonNotMade, Name{Generated: true}, fmt.Errorf(
				"spec.resourceClaims[%d] %q: no claim has been made yet from template %q", i, ref.Name, *ref.ResourceClaimTemplateName)}
		case err != nil:
			return nil, fmt.Errorf("spec.resourceClaims[%d]: %w", i, err)
		case name == nil:
			continue // meant to have no claim
		}
		names = append(names, Name{types.NamespacedName{Namespace: pod.Namespace, Name: *name}, generated})
	}
	slices.SortFunc(names, func(a, b Name) int { return strings.Compare(a.Name, b.Name) })
	once := names[:0]
	for _, name := range names {
		if last := len(once) - 1; last >= 0 && once[last].NamespacedName == name.NamespacedName {
			once[last].Generated = once[last].Generated || name.Generated
			continue
		}
		once = append(once, name)
	}
	return once, nil
}
