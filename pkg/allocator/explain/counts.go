// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package explain

// DeviceCounts says how devices look to a request whose selectors did not reject them.
type DeviceCounts struct {
	// TooSmall have less capacity than the request asks for, whatever is taken of it.
	TooSmall int `json:"tooSmall,omitempty"`
	// Failing is the number of devices on which a selector failed at run time, or whose capacity cannot be judged.
	Failing int `json:"failing,omitempty"`
	// Matching passed all selectors. Each of them is in exactly one of Unsupported, Tainted, Held, Incompatible, Exhausted and Free: in the
	// first that is true of it, in this order. What comes later does not matter until that is mended: the holder of a tainted device may
	// go, and the device is no better.
	Matching int `json:"matching"`
	// Held are held by other claims, so that nothing of them is left. Always 0 for admin access.
	Held int `json:"held,omitempty"`
	// Foreign are those of Held of which another namespace has shares, on nodes where shares of one device are one namespace's.
	Foreign int `json:"foreign,omitempty"`
	// Exhausted have less left of a shared counter or of their capacity than the request needs.
	Exhausted int `json:"exhausted,omitempty"`
	// Full are those of Exhausted that several claims may share, and whose holders leave too little capacity.
	Full int `json:"full,omitempty"`
	// Incompatible have no compatibility group in common with devices in use that take of the same counters.
	Incompatible int `json:"incompatible,omitempty"`
	// Tainted have a taint that the request does not tolerate; Taints counts them by the key of the first such taint, in an [Explanation]
	// followed by the DeviceTaintRule that sets it, if one does and that is known.
	Tainted int            `json:"tainted,omitempty"`
	Taints  map[string]int `json:"taints,omitempty"`
	// Unsupported need a feature that is not supported: they consume shared counters while that is off, or are NodeAllocatable or Skipping.
	Unsupported int `json:"unsupported,omitempty"`
	// NodeAllocatable are those of Unsupported that stand for CPU or memory of a node, or need some of it. Nobody accounts for that.
	NodeAllocatable int `json:"nodeAllocatable,omitempty"`
	// Skipping are those of Unsupported that need node operations to be skipped, which the node cannot, or which is not
	// enabled.
	Skipping int `json:"skipping,omitempty"`
	// Free could be had now, each alone.
	Free int `json:"free,omitempty"`
}

// Add adds all counts but those by taint, which have other names in a sum.
func (d *DeviceCounts) Add(o *DeviceCounts) {
	d.TooSmall += o.TooSmall
	d.Failing += o.Failing
	d.Matching += o.Matching
	d.Held += o.Held
	d.Foreign += o.Foreign
	d.Exhausted += o.Exhausted
	d.Full += o.Full
	d.Incompatible += o.Incompatible
	d.Tainted += o.Tainted
	d.Unsupported += o.Unsupported
	d.NodeAllocatable += o.NodeAllocatable
	d.Skipping += o.Skipping
	d.Free += o.Free
}
