// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package failures

import (
	"regexp"
	"strings"

	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
)

// vainPreemption is what DefaultPreemption says when it has found nobody to evict, for a pod or a group of pods, among what other plugins
// say. That a victim is still terminating, or that preemption failed, is none of it.
var vainPreemption = regexp.MustCompile(`(?s)(^|, )(pod group )?preemption: (` + strings.Join([]string{
	`0/\d+ nodes are available:.*?\.`, // then, by node, why evicting pods does not help
	`not eligible due to preemptionPolicy=Never\.`,
	`no candidate node for preemption`,
	`No preemption victims found for incoming preemptor`,
}, "|") + `)(, |$)`)

// vainReason is what DefaultPreemption says of nodes on which it has nothing to say.
var vainReason = regexp.MustCompile(`^\d+ (No preemption victims found for incoming pod|Preemption is not helpful for scheduling)$`)

// count is how many nodes a reason is for.
var count = regexp.MustCompile(`^\d+ `)

// WithoutVainPreemption takes out of a failed attempt's status what helps nobody: that preemption does not help either. What
// still keeps the pod off a node after the evictions stays, if it has not been said of the node before. The attempt is over, and
// its error is told to nobody but the pod.
func WithoutVainPreemption(status *fwk.Status) *fwk.Status {
	fit, ok := status.AsError().(*framework.FitError) //nolint:errorlint // as the framework does it
	if ok {
		before := *fit
		before.Diagnosis.PostFilterMsg = ""
		fit.Diagnosis.PostFilterMsg = cutVainPreemption(fit.Diagnosis.PostFilterMsg, before.Error())
		return status
	}
	if !status.IsRejected() || !vainPreemption.MatchString(status.Message()) {
		return status
	}
	// A pod that has a node, and whose group has none for all its pods.
	told, reasons := fwk.NewStatus(status.Code()).WithPlugin(status.Plugin()), status.Reasons()
	if err := status.AsError(); reasons[0] == err.Error() && !vainPreemption.MatchString(reasons[0]) {
		told, reasons = told.WithError(err), reasons[1:]
	}
	for _, reason := range reasons {
		if reason = cutVainPreemption(reason, ""); reason != "" {
			told.AppendReason(reason)
		}
	}
	return told
}

func cutVainPreemption(text, before string) string {
	return vainPreemption.ReplaceAllStringFunc(text, func(found string) string {
		if saysMore(found, before) {
			return found
		}
		if strings.HasPrefix(found, ", ") && strings.HasSuffix(found, ", ") {
			return ", "
		}
		return ""
	})
}

// saysMore tells whether a sentence of DefaultPreemption has a reason that is not among those before.
func saysMore(sentence, before string) bool {
	_, reasons, byNode := strings.Cut(sentence, " nodes are available: ")
	if !byNode {
		return false
	}
	for reason := range strings.SplitSeq(strings.TrimRight(reasons, "., "), ", ") {
		if !vainReason.MatchString(reason) && !strings.Contains(before, count.ReplaceAllString(reason, "")) {
			return true
		}
	}
	return false
}
