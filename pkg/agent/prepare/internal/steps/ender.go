// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"stowage.dev/stowage/pkg/agent/sharing"
)

// Leftovers says what is done about processes of a claim's pods that are still on its devices when it is unprepared.
type Leftovers string

// The policies.
const (
	// EndLeftovers kills them; a GPU whose processes do not end is quarantined.
	EndLeftovers Leftovers = "end"
	// QuarantineLeftovers leaves them alone, and quarantines the GPU until they are gone.
	QuarantineLeftovers Leftovers = "quarantine"
)

const endPoll = 20 * time.Millisecond

// Ender ends what the claim's pods have left running.
type Ender struct {
	Tool   sharing.Processes
	Policy Leftovers
	// Timeout is for processes to end and for their memory to be freed.
	Timeout time.Duration
}

// await asks again and again until nothing is left. Otherwise it says what was left last, rather than why no more is known.
func (e Ender) await(ctx context.Context, ask func(context.Context) (left, err error)) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, endPoll, e.Timeout, true, func(ctx context.Context) (bool, error) {
		left, err := ask(ctx)
		if left != nil {
			last = left
		}
		return left == nil, err
	})
	if err != nil && last != nil {
		return last
	}
	return err
}

// cannotEnd is what is left, and why one of it stays.
func cannotEnd(left, err error) error { return fmt.Errorf("%w, and cannot be ended: %w", left, err) }

// isOf tells whether the process is one of these pods, and of which. One that has ended is none.
func (e Ender) isOf(pid uint32, pods []types.UID) (pod types.UID, is bool, err error) {
	pod, err = e.Tool.PodOf(pid)
	if errors.Is(err, sharing.ErrNoProcess) {
		return "", false, nil
	}
	// One of the host has the pod "". It is nobody's, whatever the record says: it would be killed.
	return pod, pod != "" && slices.Contains(pods, pod), err
}
