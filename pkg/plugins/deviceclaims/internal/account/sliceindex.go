// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package account

import (
	"maps"

	resourceapi "k8s.io/api/resource/v1"
	resourcev1 "k8s.io/client-go/informers/resource/v1"
	"k8s.io/client-go/tools/cache"
)

// sharedSliceIndex has a ResourceSlice informer on which upstream's tracker for slices and taint rules can be started twice.
//
// kube-scheduler starts one for its own plugin, whether that is enabled or not, and it gives no access to its
// events. A second one cannot be started on the same informer, because it adds its index again. A second
// informer would hold all slices twice. The index is the same one, so the second time it need not be added.
type sharedSliceIndex struct{ resourcev1.Interface }

func (v sharedSliceIndex) ResourceSlices() resourcev1.TypedResourceSliceInformer {
	return sliceIndexResource{v.Interface.ResourceSlices()}
}

type sliceIndexResource struct {
	resourcev1.TypedResourceSliceInformer
}

func (r sliceIndexResource) TypedInformer() resourcev1.ResourceSliceIndexInformer {
	return sliceIndexInformer{r.TypedResourceSliceInformer.TypedInformer()}
}

type sliceIndexInformer struct {
	resourcev1.ResourceSliceIndexInformer
}

// AddTypedIndexers adds the indexers that the informer does not have yet.
func (i sliceIndexInformer) AddTypedIndexers(indexers cache.TypedIndexers[*resourceapi.ResourceSlice]) error {
	missing, present := maps.Clone(indexers), i.GetIndexer().GetIndexers()
	maps.DeleteFunc(missing, func(name string, _ cache.TypedIndexFunc[*resourceapi.ResourceSlice]) bool {
		return present[name] != nil
	})
	if len(missing) == 0 {
		return nil
	}
	return i.ResourceSliceIndexInformer.AddTypedIndexers(missing)
}
