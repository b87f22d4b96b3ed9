// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cycle

import (
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podmemory"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/searchtime"
)

// Plan is what PreFilter found out about a pod. It does not change afterwards.
type Plan struct {
	// Claims are the pod's claims as they were in PreFilter, each once, ordered by name.
	Claims []podclaims.Claim
	// Base is what a node has to satisfy that has device plugins for all extended resources of the pod.
	Base *extended.Variant
	// Extended is about the pod's extended resources, nil if it asks for none that a DeviceClass may stand for.
	Extended *extended.Plan
	// Budget is the time that Filter has.
	Budget *searchtime.Budget
	// Failed is what could not be made ready for the pod in earlier attempts. Nil if there is nothing.
	Failed *podmemory.Failures
}

// PreFilterResult limits the nodes to those that the allocated claims name. Nil means no limit.
func (p *Plan) PreFilterResult() *fwk.PreFilterResult {
	var limit *fwk.PreFilterResult
	for _, pc := range p.Claims {
		if pc.Nodes != nil {
			limit = limit.Merge(&fwk.PreFilterResult{NodeNames: podclaims.NodesByName(pc.Allocation().NodeSelector)})
		}
	}
	return limit
}
