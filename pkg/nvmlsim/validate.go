package nvmlsim

func (p *Profile) validate() error { return nil }
