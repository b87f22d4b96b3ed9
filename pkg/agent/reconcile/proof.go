// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// LookedOnce is why a claim is kept that nobody seemed to use when it was looked at for the first time:
// it takes a second look, an Interval later.
const LookedOnce = "it has been looked at only once"

// StartedRecently is why a claim is kept until the kubelet has had the time to get its pods.
const StartedRecently = "the kubelet has started a short time ago"

// Look takes a reading of one claim, also of one whose record cannot be read, and says why it must stay; empty if it is certain, by the
// same proof as for leftovers, that nobody uses it. It changes nothing.
func (r *Reconciler) Look(ctx context.Context, claim types.UID, files []cdi.File) (keep string, err error) {
	records, err := r.opts.Ledger.Records()
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(records, func(r *ledger.Record) bool { return r.UID == claim })
	if i < 0 {
		return "", nil
	}
	record, node, of := records[i], &nodeReading{sources: &r.opts.Sources}, subject{claim: claim}
	if entry := record.Entry; entry != nil {
		_, keep = r.conclude(of, r.read(ctx, entry, records, node), func(r *Reading) string { return inUse(entry, r) })
		return keep, nil
	}
	// The claim's CDI file tells its devices, which may be less than the GPUs in the record's name.
	file := cdi.File{Claim: claim, Devices: record.GPUs}
	if i := slices.IndexFunc(files, func(f cdi.File) bool { return f.Claim == claim && f.Err == nil }); i >= 0 {
		file = files[i]
	}
	if len(file.Devices) == 0 {
		return "it is not known which GPUs it holds", nil
	}
	_, keep = r.lookAtFile(ctx, of, &file, records, node)
	return keep, nil
}

// withoutEnded leaves out pods that are being deleted and of which no process is left: a pod whose claim cannot be unprepared stays so.
func (n *nodeReading) withoutEnded(ctx context.Context) {
	if n.sources.Ended == nil {
		return
	}
	n.reading.Pods = slices.DeleteFunc(slices.Clone(n.reading.Pods), func(pod corev1.Pod) bool {
		if pod.DeletionTimestamp == nil || !n.sources.Ended(ctx, &pod) {
			return false
		}
		n.reading.Kubelet = slices.DeleteFunc(n.reading.Kubelet,
			func(k KubeletPod) bool { return k.Namespace == pod.Namespace && k.Name == pod.Name })
		return true
	})
}
