// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// strays looks at the CDI files that no record of the ledger owns, and removes those that certainly nobody uses. left is how many stay.
func (r *Reconciler) strays(ctx context.Context, records []*ledger.Record, node *nodeReading,
	present map[subject]bool,
) (left int, err error) {
	files, err := r.opts.Strays()
	if err != nil {
		return 0, err
	}
	logger := klog.FromContext(ctx)
	var errs []error
	for i := range files {
		file := &files[i]
		of := subject{claim: file.Claim, file: true}
		present[of] = true
		left++
		unused, keep := r.lookAtFile(ctx, of, file, records, node)
		if !unused {
			if r.say(of, keep) {
				logger.Info("CDI specification of a claim that is not in the ledger stays", "claimUID", file.Claim,
					"devices", file.Devices, "reason", keep)
			}
			continue
		}
		logger.Info("CDI specification belongs to no claim of the ledger, and nobody uses it: removing it",
			"claimUID", file.Claim, "devices", file.Devices)
		if err := r.opts.RemoveStray(ctx, file.Claim); err != nil {
			errs = append(errs, fmt.Errorf("remove the CDI specification of claim %s, which nobody uses: %w", file.Claim, err))
			continue
		}
		r.forget(of)
		left--
	}
	return left, errors.Join(errs...)
}

// lookAtFile takes a reading of one file and decides, with the one before.
func (r *Reconciler) lookAtFile(ctx context.Context, of subject, file *cdi.File, records []*ledger.Record,
	node *nodeReading,
) (unused bool, keep string) {
	if file.Err != nil {
		return false, fmt.Sprintf("it is not known which GPUs it is for: %v", file.Err)
	}
	reading := &Reading{At: r.opts.Clock.Now()}
	node.fill(ctx, reading)
	reading.Users, reading.UsersErr = node.users(ctx)
	// The file has no more than names, which tell the places of what is offered still.
	places := map[string][]*ledger.Partition{}
	for _, device := range file.Devices {
		gpu, at := r.opts.Sources.PlaceOf(device)
		places[gpu] = append(places[gpu], at)
	}
	for gpu, at := range places {
		r.countProcesses(ctx, reading, gpu, file.Claim, records, at...)
	}
	return r.conclude(of, reading, func(r *Reading) string { return fileInUse(file.Claim, r) })
}

// nodeUsers are the node's pods that have not ended, by the UIDs of their claims.
type nodeUsers struct {
	once sync.Once
	pods map[types.UID]string
	err  error
}

// users asks for the claims of all pods of the node, once for all files of a look. To be called after fill.
func (n *nodeReading) users(ctx context.Context) (map[types.UID]string, error) {
	n.claims.once.Do(func() {
		n.claims.pods = map[types.UID]string{}
		for i := range n.reading.Pods {
			pod := &n.reading.Pods[i]
			if terminal(pod) {
				continue
			}
			for _, name := range claimsOf(pod) {
				claim, err := n.sources.Claim(ctx, pod.Namespace, name)
				switch {
				case err == nil:
					n.claims.pods[claim.UID] = pod.Namespace + "/" + pod.Name
				case !apierrors.IsNotFound(err):
					n.claims.err = errors.Join(n.claims.err, fmt.Errorf("claim %s/%s: %w", pod.Namespace, name, err))
				}
			}
		}
	})
	return n.claims.pods, n.claims.err
}
