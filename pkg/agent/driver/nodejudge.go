// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/reconcile"
)

// ConditionGPUsReady is the agent's condition of its Node: claims can be prepared there, and each of its GPUs can be used.
const ConditionGPUsReady corev1.NodeConditionType = "GPUsReady"

// Reasons of the condition, besides those of an agent that is not ready.
const (
	reasonAllGPUsReady  = "AllGPUsReady"
	reasonNoGPUs        = "NoGPUsFound"
	reasonGPUsUnhealthy = "GPUsUnhealthy"
	reasonGPUsSilent    = "GPUsDoNotAnswer"
	reasonGPUsOccupied  = "GPUsOccupied"
	reasonForeignUse    = "GPUsUsedWithoutClaim"
)

// reasonHostConfiguration is of the Node's event about [Options.Warning].
const reasonHostConfiguration = "HostConfiguration"

// maxNodeMessage keeps kubectl describe readable.
const maxNodeMessage = 1500

// onNode is what there is to say of the node as a whole, besides whether the agent is ready.
type onNode struct {
	// warning is what Options.Warning has said last, and aside why the driver is not open; nil if it may be.
	warning atomic.Pointer[string]
	aside   atomic.Pointer[problem]

	withheld *withheld
	refresh  func()
	reporter *reporter
}

// nodeView is what is known of the node when its condition is judged.
type nodeView struct {
	// notReady is why claims cannot be prepared, nil if they can; noGPUs why no GPU can be used.
	notReady *problem
	noGPUs   string
	// gpus are the published ones, by name, and silent those that do not answer and are not published, each with its reason.
	gpus   []gpuView
	silent []string
	// warning is of the host's configuration.
	warning string
}

// gpuView is what is known of one GPU.
type gpuView struct {
	name     string
	verdict  health.Verdict
	occupied []string // who has something of it that nobody else can have
	foreign  *foreignUse
}

// judgeNode says what the condition should be. Each GPU that cannot be used is named with everything that is known to be wrong with it;
// the reason is that of the first.
func judgeNode(v nodeView) corev1.NodeCondition {
	c := corev1.NodeCondition{Type: ConditionGPUsReady, Status: corev1.ConditionFalse}
	switch {
	case v.notReady != nil:
		c.Reason, c.Message = v.notReady.reason, "Claims cannot be prepared on this node: "+v.notReady.message
	case v.noGPUs != "":
		c.Reason, c.Message = reasonNoGPUs, "No GPU can be used: "+v.noGPUs
	case len(v.gpus)+len(v.silent) == 0:
		c.Reason, c.Message = reasonNoGPUs, "No GPU can be used: NVML finds none"
	default:
		c.Status, c.Reason, c.Message = judgeGPUs(v)
	}
	c.Message = shorten(c.Message)
	return c
}

func judgeGPUs(v nodeView) (status corev1.ConditionStatus, reason, message string) {
	reason = reasonAllGPUsReady
	bad := 0
	var notes []string
	note := func(name, text string) { notes = append(notes, name+": "+text) }
	for _, gpu := range v.gpus {
		why := ""
		because := func(r string) {
			if why == "" {
				why = r
			}
		}
		if message := gpu.verdict.Message(); message != "" {
			note(gpu.name, message)
		}
		if gpu.verdict.Status == health.Unhealthy {
			because(reasonGPUsUnhealthy)
		}
		for _, holder := range gpu.occupied {
			note(gpu.name, holder)
			because(reasonGPUsOccupied)
		}
		if gpu.foreign != nil {
			note(gpu.name, gpu.foreign.message())
			if gpu.foreign.takesOut() {
				because(reasonForeignUse)
			}
		}
		if why != "" {
			bad++
			if reason == reasonAllGPUsReady {
				reason = why
			}
		}
	}
	for _, text := range v.silent {
		notes = append(notes, text)
		bad++
		if reason == reasonAllGPUsReady {
			reason = reasonGPUsSilent
		}
	}
	if v.warning != "" {
		notes = append(notes, v.warning)
	}
	all := len(v.gpus) + len(v.silent)
	message = fmt.Sprintf("%d of %d GPUs can be used", all-bad, all)
	if len(notes) > 0 {
		message += "; " + strings.Join(notes, "; ")
	}
	if bad > 0 {
		return corev1.ConditionFalse, reason, message
	}
	return corev1.ConditionTrue, reason, message
}

// shorten also makes text valid: the API server would keep another one, which would be written again and again.
func shorten(text string) string {
	text = strings.ToValidUTF8(text, "?")
	if len(text) <= maxNodeMessage {
		return text
	}
	const more = " …"
	return strings.ToValidUTF8(text[:maxNodeMessage-len(more)], "") + more
}

// nodeView is what is known now; ok is false while too little is known to judge.
func (a *Agent) nodeView() (v nodeView, ok bool) {
	h := a.opts.Hardware
	v.notReady = cmp.Or(a.onNode.aside.Load(), a.check.told.Load())
	if warning := a.onNode.warning.Load(); warning != nil {
		v.warning = *warning
	}
	found, why := a.status.get(stageGPUs)
	if !found {
		v.noGPUs = why.message
		return v, v.notReady != nil || v.noGPUs != ""
	}
	if asked, _ := h.monitor.Known(); !asked {
		return v, v.notReady != nil
	}
	node := h.inventory.found()
	for _, gpu := range node.GPUs {
		view := gpuView{name: gpu.Name, verdict: h.monitor.Of(gpu.Name, nil)}
		occupied, foreign, _ := h.withheld.of(gpu.Name)
		view.foreign = foreign
		for _, place := range occupied {
			view.occupied = append(view.occupied, place.message())
		}
		slices.Sort(view.occupied)
		view.occupied = slices.Compact(view.occupied)
		v.gpus = append(v.gpus, view)
	}
	for _, f := range node.Failures {
		if !slices.ContainsFunc(v.gpus, func(g gpuView) bool { return g.name == f.Device() }) {
			v.silent = append(v.silent, f.String())
		}
	}
	return v, true
}

// message says who keeps others off, for people.
func (o *occupiedPlace) message() string {
	switch {
	case o.quarantined && o.claim == "":
		return "it is in quarantine: something that could not be undone is left on it"
	case o.quarantined && o.at != nil && o.at.Size == 0:
		return fmt.Sprintf("it is in quarantine as a whole: MIG mode, which was switched on for claim %s, could not be switched off", o.claim)
	case o.quarantined && o.at != nil:
		return fmt.Sprintf("its partition %s is in quarantine: something of claim %s that could not be undone is left there", o.at, o.claim)
	case o.quarantined:
		return fmt.Sprintf("it is in quarantine: something of claim %s that could not be undone is left on it", o.claim)
	case o.why == reconcile.Unread:
		return fmt.Sprintf("it is held for claim %s, whose record cannot be read", o.claim)
	case o.why == reconcile.Unknown:
		return fmt.Sprintf("it is held for claim %s, and the API server has not told yet whether that is allocated", o.claim)
	}
	return fmt.Sprintf("it is held for claim %s, which is not allocated any more", o.claim)
}
