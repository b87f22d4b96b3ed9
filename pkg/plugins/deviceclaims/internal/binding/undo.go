// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/decisions"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
)

const (
	// UndoTimeout bounds how long Unreserve tries to take back what is known to be written.
	UndoTimeout = 30 * time.Second
	// undoRequestTimeout bounds each of its requests.
	undoRequestTimeout = 10 * time.Second
	// undoConflicts is how many conflicts it meets before it pauses.
	undoConflicts = 5
	// Grace is how long a binding without an answer is given to take effect.
	Grace = 2 * time.Second
)

// undoPauses are how long Unreserve waits before it tries again. Without an API server no pod can be scheduled, so
// there is no hurry.
var undoPauses = wait.Backoff{Duration: 50 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 100, Cap: 2 * time.Second}

// Undo takes back what Bind wrote to the claims of a pod.
//
// The answer to the binding of a pod can be lost, too, and another scheduler may have bound it with the reservation
// that stands in the claim. So nothing is taken away from a pod that has a node, or may have one. sent tells that the
// pod may have been sent to be bound.
//
// It returns the claims that keep what was written.
func (b *Binder) Undo(ctx context.Context, pod *v1.Pod, node string, writes []*Write, sent bool) sets.Set[types.UID] {
	kept := sets.New[types.UID]()
	writes = slices.DeleteFunc(slices.Clone(writes), func(w *Write) bool { return !w.MayStand() })
	if len(writes) == 0 {
		return kept
	}
	// The scheduling cycle's context may have ended, which may be why the pod is unreserved.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(b.ended, cancel)()

	logger := klog.LoggerWithValues(klog.FromContext(ctx), "pod", klog.KObj(pod))
	keep, err := b.HasNode(klog.NewContext(ctx, logger), pod, sent)
	switch {
	case err != nil:
		logger.Error(err, "Cannot find out whether a pod is bound, its claims stay allocated and reserved for it")
		keep = true
	case keep:
		for _, w := range writes {
			decisions.Log(ctx, decisions.Kept, pod, node, w.Planned, w.Result(), "the pod is bound although its binding failed")
		}
	}
	for _, w := range slices.Backward(writes) {
		logger := klog.LoggerWithValues(logger, "claim", klog.KObj(w.Planned))
		// What is reserved for the group may be in use by its other pods. If it is not, and the group does not fit with it, it is given
		// up by PodGroupPostFilter.
		keep := keep || w.User.UID != pod.UID
		err := b.undoWrite(klog.NewContext(ctx, logger), w, keep)
		countUndo(keep, err)
		if err != nil {
			logger.Error(err, "Cannot take back allocation and reservation of a claim, the pod will use them when it is tried again")
		}
		if keep || err != nil {
			kept.Insert(w.Planned.UID)
		}
	}
	return kept
}

// HasNode finds out whether the pod is bound. A pod that is gone is not.
//
// If the pod was sent to be bound, and only the answer is missing, that may take effect later. Unlike a write of a claim it
// cannot be barred, because it asks for no resource version. So it is waited for, and what comes later still binds a
// pod without devices, which the kubelet does not start.
func (b *Binder) HasNode(ctx context.Context, pod *v1.Pod, sent bool) (bool, error) {
	state, err := b.ReadPod(ctx, pod)
	if err != nil || state != podWaits || !sent {
		return state == PodBound, err
	}
	select {
	case <-b.Clock.After(b.Grace):
	case <-ctx.Done():
		return false, ctx.Err()
	}
	state, err = b.ReadPod(ctx, pod)
	return state == PodBound, err
}

// podState is what the API server says of a pod that the scheduler has.
type podState int

const (
	podUnknown podState = iota
	// PodGone: does not exist any more.
	PodGone
	// podEnds: is being deleted, and will not be bound before.
	podEnds
	// podWaits: has no node.
	podWaits
	// PodBound: has a node.
	PodBound
)

// ReadPod asks the API server, again and again for UndoTimeout if it does not answer.
func (b *Binder) ReadPod(ctx context.Context, pod *v1.Pod) (podState, error) {
	state := podUnknown
	err := b.Persist(ctx, func() bool { return false }, func(ctx context.Context) error {
		current, err := b.Client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err), err == nil && current.UID != pod.UID:
			state = PodGone
		case err != nil:
			return fmt.Errorf("read the pod: %w", err)
		case current.Spec.NodeName != "":
			state = PodBound
		case current.DeletionTimestamp != nil:
			state = podEnds
		default:
			state = podWaits
		}
		return nil
	})
	return state, err
}

// undoWrite takes back one write, or with keep only finds out what has become of it. As long as that is not known
// it goes on trying, because until then the claim's devices must not go to anybody else.
func (b *Binder) undoWrite(ctx context.Context, w *Write, keep bool) error {
	claim := w.Written
	if w.unanswered != nil {
		claim = nil
	}
	return b.Persist(ctx, func() bool { return w.unanswered != nil }, func(ctx context.Context) error {
		base := claim
		claim = nil // the next time it is read
		if base == nil {
			read, err := b.Read(ctx, w.Planned)
			if apierrors.IsNotFound(err) {
				w.unanswered = nil
				return nil
			}
			if err != nil {
				return fmt.Errorf("read the claim: %w", err)
			}
			base = read
		}
		return b.writeUndo(ctx, w, base, keep)
	})
}

// writeUndo takes back what w did to the claim, with the claim's resource version as the precondition.
func (b *Binder) writeUndo(ctx context.Context, w *Write, claim *resourceapi.ResourceClaim, keep bool) error {
	client := b.Client.ResourceV1().ResourceClaims(claim.Namespace)
	undone, write := barring(w, claim), client.Update
	if claim.UID != w.Planned.UID || w.unanswered == nil || w.unanswered.ResourceVersion != claim.ResourceVersion {
		w.unanswered = nil
		if keep {
			return nil
		}
		undone, write = restoring(w, claim, b.FieldManager), client.UpdateStatus
	}
	if undone != nil {
		updated, err := write(ctx, undone, metav1.UpdateOptions{FieldManager: b.FieldManager})
		CountWrite(writeUndo, err)
		if err != nil {
			return err
		}
		b.Assume(ctx, updated)
	}
	w.unanswered = nil
	return nil
}

// barring returns the claim with a change after which an unanswered write cannot take effect any more. It has had
// none so far, but may still be on its way: its devices would be taken when nobody expects it.
//
// What is changed is the finalizer, which stands there for the allocation that is not to come. Nil means that no
// change is needed. A claim that is allocated has got that from another pod, which needs the finalizer. The late write only
// adds a reservation, which takes no device and goes with its pod.
func barring(w *Write, claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	if w.Allocation == nil || claim.Status.Allocation != nil || !slices.Contains(claim.Finalizers, resourceapi.Finalizer) {
		return nil
	}
	barred := claim.DeepCopy()
	barred.Finalizers = slices.DeleteFunc(barred.Finalizers, func(f string) bool { return f == resourceapi.Finalizer })
	return barred
}

// restoring returns the claim without what w did to it, nil if there is nothing of that in it.
//
// If the claim has changed since, it tells itself what is ours. Nothing is if the claim is another one by now, or if
// another scheduler has reserved it for the pod. The allocation goes if nobody is left who has reserved the claim:
// if it is ours, and also if the claim had users before us, for the last of them would have taken it along. It stays if it
// stood there unused.
func restoring(w *Write, claim *resourceapi.ResourceClaim, manager string) *resourceapi.ResourceClaim {
	ours := w.made
	if w.Written == nil || w.Written.UID != claim.UID || w.Written.ResourceVersion != claim.ResourceVersion {
		ours = w.madeIn(claim, manager)
	}
	restored := claim.DeepCopy()
	if ours.reservation {
		podclaims.RemoveUser(restored, w.User.UID)
	}
	unused := len(restored.Status.ReservedFor) == 0
	if unused && (ours.allocation || ours.reservation && w.joined) {
		restored.Status.Allocation = nil
		restored.Status.Devices = nil
	} else if !ours.reservation {
		return nil
	}
	return restored
}

// Persist calls try until it succeeds, with pauses except after a conflict. It gives up when UndoTimeout has passed and
// unsure is false, or when the scheduler ends.
func (b *Binder) Persist(ctx context.Context, unsure func() bool, try func(context.Context) error) error {
	deadline := b.Clock.Now().Add(UndoTimeout)
	var last error
	said := ""
	err := b.UndoPauses.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		for range undoConflicts {
			requestCtx, cancel := context.WithTimeout(ctx, undoRequestTimeout)
			last = try(requestCtx)
			cancel()
			if !apierrors.IsConflict(last) || ctx.Err() != nil {
				break
			}
		}
		switch {
		case last == nil:
			return true, nil
		case !unsure() && b.Clock.Now().After(deadline):
			return false, last
		case ctx.Err() == nil && !apierrors.IsConflict(last) && podevents.Failure(last) != said:
			// While a write is unanswered there is no deadline, and its devices go to nobody: what does not pass must be seen.
			said = podevents.Failure(last)
			klog.FromContext(ctx).Error(last, "Cannot take back what was written for a pod, trying again")
		}
		return false, nil
	})
	if err != nil && last != nil && !errors.Is(err, last) {
		return fmt.Errorf("%w, after: %w", err, last)
	}
	return err
}
