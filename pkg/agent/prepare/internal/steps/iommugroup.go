// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// iommuGroup: the claim's pods open it, and none of theirs may have it open when its functions go back.
type iommuGroup struct {
	pci   PCI
	ender Ender
}

// undo returns when nobody has the IOMMU group open: vfio-pci would not let go of its functions.
func (g iommuGroup) undo(ctx context.Context, entry *ledger.Entry, step ledger.Step) error {
	sysfs, err := g.pci.Kernel()
	if err != nil {
		return err
	}
	return g.ender.await(ctx, func(ctx context.Context) (left, err error) {
		pids, err := g.pci.Users.Of(ctx, vfio.NodesOf(sysfs, step.Target)...)
		if err != nil || len(pids) == 0 {
			return nil, err
		}
		left = g.pci.InUse(step.GPU, pids[0])
		for _, pid := range pids {
			pod, is, err := g.ender.isOf(pid, entry.Pods)
			switch {
			case err != nil:
				return left, err
			case !is:
				continue
			case g.ender.Policy == QuarantineLeftovers:
				return left, left
			}
			klog.FromContext(ctx).Info("Process of a claim's pod still has its GPU open and is ended", "device", step.GPU, "pid", pid, "podUID", pod,
				"claim", klog.KRef(entry.Claim.Namespace, entry.Claim.Name))
			if err := g.ender.Tool.End(pid, pod); err != nil {
				return cannotEnd(left, err), err
			}
		}
		return left, nil
	})
}
