// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare/internal/steps"
)

// What keeps a claim from being prepared is told to its namespace: in the claim's conditions, in events of its pods, and in the kubelet's.
// It names claims and pods of that namespace; of others no more than that there are some. The log names them all; see Others.

// HeldError says that a GPU of a claim is held by another one.
type HeldError struct {
	Claim           ledger.Claim
	Request, Device string
	// Holder has the GPU. Of one whose record cannot be read no more than the UID is known.
	Holder ledger.Claim
	// Use is what is known of those who use it.
	Use Use
	// Unreadable is the reason if the holder's record cannot be read.
	Unreadable error
}

func (e *HeldError) Error() string {
	what := fmt.Sprintf("claim %s, request %s: device %s", e.Claim, e.Request, e.Device)
	use := e.Use.toldTo(e.Claim, e.Holder)
	switch {
	case e.Unreadable != nil:
		// Its namespace is not known.
		return what + " is still held on this node by a claim whose ledger record cannot be read; node-agent ledger show names it, on the node"
	case e.Use.Ends:
		return fmt.Sprintf("%s waits for %s, %s", what, named(e.Claim, e.Holder), use)
	case use != "":
		return fmt.Sprintf("%s is still held on this node by %s, %s", what, named(e.Claim, e.Holder), use)
	}
	return fmt.Sprintf("%s is still held on this node by %s", what, named(e.Claim, e.Holder))
}

func (e *HeldError) Unwrap() error { return e.Unreadable }

func (e *HeldError) holders() []types.UID { return []types.UID{e.Holder.UID} }

func (e *HeldError) note(_ ledger.Claim, use Use) { e.Use = use }

// UnreadableError says that what was done for a claim is not known, because its record cannot be read.
// It does not pass before somebody decides.
type UnreadableError struct {
	Claim types.UID
	// Path of the current copy.
	Path string
	// GPUs that the file's name says are held.
	GPUs []string
	Err  error
}

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("the ledger record %s cannot be read: %v. It holds %s until somebody decides: see node-agent ledger show %s",
		e.Path, durable.Reason(e.Err), strings.Join(e.GPUs, ", "), e.Claim)
}

func (e *UnreadableError) Unwrap() error { return e.Err }

// Unreadable is the error for a record that has one.
func Unreadable(record *ledger.Record) *UnreadableError {
	return &UnreadableError{Claim: record.UID, Path: record.Path, GPUs: heldNames(record), Err: record.Err}
}

// ShareError says that a share of a GPU cannot be given beside those that other claims have. That does not pass before
// one of them goes.
type ShareError struct {
	Claim           ledger.Claim
	Request, Device string
	// Setup is what the others have set the GPU up as, if that is the reason, and Wants how the node shares its GPUs by now.
	Setup, Wants string
	// Apart is the node if the reason is that there one namespace alone has shares of a GPU.
	Apart string
	// Capacity is what there is not enough of, otherwise: Total is all that the GPU has, and Taken what would be.
	Capacity     resourceapi.QualifiedName
	Taken, Total string
	// Others have shares of the GPU.
	Others []ledger.Claim
	// Use is what is known of those who use the share of one of them, which is Holder.
	Holder ledger.Claim
	Use    Use
}

func (e *ShareError) holders() []types.UID {
	uids := make([]types.UID, len(e.Others))
	for i, other := range e.Others {
		uids[i] = other.UID
	}
	return uids
}

func (e *ShareError) note(holder ledger.Claim, use Use) { e.Holder, e.Use = holder, use }

func (e *ShareError) Error() string {
	what := fmt.Sprintf("claim %s, request %s: device %s", e.Claim, e.Request, e.Device)
	others := named(e.Claim, e.Others...)
	if e.Use.Ends {
		others += fmt.Sprintf("; it waits for %s, %s", named(e.Claim, e.Holder), e.Use.toldTo(e.Claim, e.Holder))
	}
	if e.Capacity != "" {
		return fmt.Sprintf("%s: its share is more than is left: %s of the %s %s would be taken, with the shares that are held on this node by %s",
			what, e.Taken, e.Total, e.Capacity, cmp.Or(others, "nobody else"))
	}
	if e.Apart != "" {
		return fmt.Sprintf("%s: node %s gives shares of a GPU to one namespace alone (it is run without %s), and %s has one", what, e.Apart,
			config.AcrossNamespacesFlag, others)
	}
	return fmt.Sprintf("%s: the node shares its GPUs by %s, and this one is still shared by %s, by %s", what, e.Wants, e.Setup, others)
}

// BusyError says that a process of another pod is on a GPU that nobody holds. The text does not say whose: it may be another namespace's.
type BusyError struct {
	Claim ledger.Claim
	GPU   string
	PID   uint32
	Pod   types.UID
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("claim %s: GPU %s is in use by a process of another pod, which has no claim for it on this node", e.Claim, e.GPU)
}

// InUseError says that a process has a GPU open that is to leave its driver, or an IOMMU group that is to go back.
type InUseError = steps.InUseError

// QuarantinedError says that a GPU, or partitions of it, are nobody's, and why.
type QuarantinedError struct {
	GPU string
	// Places are the partitions, nil for all of the GPU.
	Places []*ledger.Partition
	Reason string
	Since  time.Time
	// Owed is the claim that it is in quarantine for, if that is known, and Claim the one that is refused because of it, if one is. Only
	// where both are of one namespace does the text say what it is in quarantine for: reasons name pods and processes.
	Owed, Claim ledger.Claim
	// Err is why it was not released just now.
	Err error
}

// where is the GPU, or its partitions.
func (e *QuarantinedError) where() string {
	text := "GPU " + e.GPU
	for _, place := range e.Places {
		text += ", " + place.String()
	}
	return text
}

func (e *QuarantinedError) Error() string {
	if e.Claim.UID != "" && e.Claim.Namespace != e.Owed.Namespace {
		return fmt.Sprintf("%s is in quarantine since %s: what an earlier claim did to it is not undone; node-agent ledger show says "+
			"more, on the node", e.where(), e.Since.Format(time.RFC3339))
	}
	return e.inFull()
}

// inFull is for the node's log and its administrators.
func (e *QuarantinedError) inFull() string {
	return fmt.Sprintf("%s is in quarantine since %s (%s): %v", e.where(), e.Since.Format(time.RFC3339), e.Reason, e.Err)
}

func (e *QuarantinedError) Unwrap() error { return e.Err }

// named names the others to the namespace of the claim.
func named(to ledger.Claim, others ...ledger.Claim) string {
	var own []string
	foreign, plugin := 0, false
	for _, other := range others {
		switch {
		case other.Plugin != (ledger.PluginDevice{}):
			plugin = true
		case other.Namespace == to.Namespace:
			own = append(own, other.String())
		default:
			foreign++
		}
	}
	var parts []string
	switch len(own) {
	case 0:
	case 1:
		parts = append(parts, "claim "+own[0])
	default:
		parts = append(parts, "claims "+strings.Join(own, ", "))
	}
	switch foreign {
	case 0:
	case 1:
		parts = append(parts, "a claim of another namespace")
	default:
		parts = append(parts, fmt.Sprintf("%d claims of other namespaces", foreign))
	}
	if plugin {
		parts = append(parts, "a pod that has it by the device plugin")
	}
	return strings.Join(parts, " and ")
}

// toldTo is what the namespace of a claim may know of those who use another one.
func (u Use) toldTo(to, of ledger.Claim) string {
	if of.Namespace != to.Namespace {
		return u.Public
	}
	return u.Text
}

// Others names, for the log, the claims and pods that an error is about besides its own, and what is known of them. An error's text is for
// the claim's namespace, and names no others'.
func Others(err error) []string {
	var (
		held        *HeldError
		share       *ShareError
		quarantined *QuarantinedError
		busy        *BusyError
		names       []string
	)
	add := func(claim ledger.Claim, use Use) {
		if claim.Name == "" {
			return
		}
		name := claim.String()
		if use.Text != "" {
			name += ", " + use.Text
		}
		names = append(names, name)
	}
	switch {
	case errors.As(err, &held) && held.Unreadable != nil:
		names = append(names, fmt.Sprintf("%s: %v", held.Holder.UID, held.Unreadable))
	case errors.As(err, &held):
		add(held.Holder, held.Use)
	case errors.As(err, &share):
		for _, other := range share.Others {
			var use Use
			if other == share.Holder {
				use = share.Use
			}
			add(other, use)
		}
	case errors.As(err, &quarantined):
		add(quarantined.Owed, Use{})
		names = append(names, quarantined.inFull())
	case errors.As(err, &busy):
		names = append(names, fmt.Sprintf("process %d of pod %s", busy.PID, busy.Pod))
	}
	return names
}
