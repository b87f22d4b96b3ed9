// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"iter"

	resourceapi "k8s.io/api/resource/v1"
)

// anyRequest has what exact requests and the alternatives of firstAvailable have in common.
type anyRequest struct {
	// position is that of the request in the claim.
	position int
	// sub is the position of the alternative; -1 for an exact request.
	sub int
	// name is the request's, or the alternative's own.
	name, class string
	mode        resourceapi.DeviceAllocationMode
}

// requestsOf yields the exact requests and the alternatives of the others, in order.
func requestsOf(claim *resourceapi.ResourceClaim) iter.Seq[anyRequest] {
	return func(yield func(anyRequest) bool) {
		for i := range claim.Spec.Devices.Requests {
			request := &claim.Spec.Devices.Requests[i]
			for j := range request.FirstAvailable {
				sub := &request.FirstAvailable[j]
				if !yield(anyRequest{
					position: i, sub: j, name: sub.Name, class: sub.DeviceClassName, mode: sub.AllocationMode,
				}) {
					return
				}
			}
			if exact := request.Exactly; exact != nil && len(request.FirstAvailable) == 0 && !yield(anyRequest{
				position: i, sub: -1, name: request.Name, class: exact.DeviceClassName, mode: exact.AllocationMode,
			}) {
				return
			}
		}
	}
}

// only returns a copy of the claim that has the given request, or alternative, alone.
func only(claim *resourceapi.ResourceClaim, request anyRequest) *resourceapi.ResourceClaim {
	reduced := claim.DeepCopy()
	one := reduced.Spec.Devices.Requests[request.position]
	if request.sub >= 0 {
		one.FirstAvailable = one.FirstAvailable[request.sub : request.sub+1]
	}
	reduced.Spec.Devices.Requests = []resourceapi.DeviceRequest{one}
	return reduced
}
